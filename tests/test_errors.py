"""Every error can be caught as this package's own, and as the builtin that a caller would expect."""

from __future__ import annotations

from pathlib import Path

import pytest

import adaflash_hf
from adaflash_hf import errors


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "AdaFlashError"])
def test_errors_are_caught_both_ways(name: str) -> None:
    _, builtin = getattr(errors, name).__bases__
    assert builtin.__module__ == "builtins"
    for caught in (errors.AdaFlashError, builtin):
        with pytest.raises(caught, match="why"):
            raise getattr(errors, name)("why")


def test_all_are_names_of_the_package() -> None:
    assert set(errors.__all__) <= set(adaflash_hf.__all__)
    assert all(getattr(adaflash_hf, name) is getattr(errors, name) for name in errors.__all__)


def test_all_are_in_the_reference() -> None:
    page = Path(__file__).resolve().parents[1] / "docs" / "reference" / "errors.md"
    listed = [line.rpartition(".")[2] for line in page.read_text(encoding="utf-8").splitlines() if line[:3] == ":::"]
    assert sorted(listed) == errors.__all__
