"""The speculative algorithm ADAFLASH for an unmodified SGLang: DFLASH, with verify lengths of the length head.

SGLang finds `register` through the entry point group `sglang.srt.plugins` in each of its processes. Nothing else of
this package imports SGLang, and nothing here does before SGLang asks for it.
"""

from __future__ import annotations

import sys


__all__ = ["register"]


def register() -> None:
    """Makes ADAFLASH known to SGLang. Whether it can work here is checked when a server is to use it."""
    from .algorithm import register_algorithm
    from .hooks import register_hooks

    register_algorithm()
    # Hooks import what they are put on, for which processes that only turn tokens into text have no use.
    if "sglang.srt.managers.scheduler" in sys.modules:
        register_hooks()
