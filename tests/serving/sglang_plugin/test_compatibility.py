"""The check of the installed SGLang, on modules that stand for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import entry_points
from types import ModuleType

import pytest

import adaflash_hf.serving.sglang_plugin
from adaflash_hf import MissingDependencyError
from adaflash_hf.serving.sglang_plugin.compatibility import (
    HOOKS,
    SUPPORTED_VERSION,
    Hook,
    check_sglang,
    missing_hooks,
)


@dataclass
class Result:
    """A class of an engine that is extended."""

    accepted: int
    lengths: list[int]

    def judge(self, candidates: int, logits: float) -> None:
        """A method that is overridden."""


class Algorithm(Enum):
    """Methods of an enumeration are hidden from `dir()`."""

    PLAIN = 1

    def needs_topk(self) -> bool:
        return False


@pytest.fixture
def engine() -> Iterator[str]:
    module = ModuleType("stand_in_engine")
    module.Result = Result  # type: ignore[attr-defined]
    module.Algorithm = Algorithm  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module.__name__
    del sys.modules[module.__name__]


def test_what_is_there_is_not_missing(engine: str) -> None:
    hooks = [
        Hook(f"{engine}.Result", ("lengths", "judge")),
        Hook(f"{engine}.Result.judge", ("candidates", "logits")),
        Hook(f"{engine}.Algorithm", ("PLAIN", "needs_topk")),
    ]
    assert missing_hooks(hooks) == []
    check_sglang(hooks, installed=SUPPORTED_VERSION)


def test_the_message_names_what_is_missing(engine: str) -> None:
    hooks = [
        Hook(f"{engine}.Result.judge", ("candidates", "drafts", "bonus")),
        Hook(f"{engine}.Result", ("cap_lens",)),
        Hook(f"{engine}.Worker"),
        Hook("no_such_engine.at.all"),
    ]
    with pytest.raises(MissingDependencyError) as caught:
        check_sglang(hooks, installed=SUPPORTED_VERSION)
    message = str(caught.value)
    assert f"{engine}.Result.judge has no drafts, bonus" in message
    assert f"{engine}.Result has no cap_lens" in message
    assert f"{engine}.Worker is missing" in message
    assert "no_such_engine.at.all is missing" in message
    assert "pip install --force-reinstall --no-deps sglang==0.5.23" in message


def test_another_version_is_refused_before_its_hooks_are_looked_at() -> None:
    with pytest.raises(MissingDependencyError, match=r"works with SGLang 0.5.23, and 0.6.0 is installed.*DFLASH"):
        check_sglang(HOOKS, installed="0.6.0")


@pytest.mark.skipif("sglang" in sys.modules, reason="SGLang is installed")
def test_without_sglang_the_message_says_what_to_install() -> None:
    with pytest.raises(MissingDependencyError, match="pip install sglang==0.5.23"):
        check_sglang()


def test_sglang_finds_the_plugin() -> None:
    (found,) = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "adaflash"]
    assert found.load() is adaflash_hf.serving.sglang_plugin.register
    assert not any(name == "sglang" or name.startswith("sglang.") for name in sys.modules)
