"""The speculative algorithm ADAFLASH for an unmodified SGLang: DFLASH, with verify lengths of the length head.

SGLang finds `register` through the entry point group `sglang.srt.plugins` in each of its processes. Nothing else of
this package imports SGLang, and nothing here does before SGLang asks for it.
"""

from __future__ import annotations


__all__ = ["register"]


def register() -> None:
    """Makes ADAFLASH known to SGLang. Whether it can work here is checked when a server is to use it."""
    from .algorithm import register_algorithm
    from .weight_updates import register_hooks

    register_algorithm()
    register_hooks()
