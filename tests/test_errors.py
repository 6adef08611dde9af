"""Every error can be caught as this package's own, and as the builtin that a caller would expect."""

from __future__ import annotations

import pytest

from adaflash_hf import errors


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "AdaFlashError"])
def test_errors_are_caught_both_ways(name: str) -> None:
    _, builtin = getattr(errors, name).__bases__
    assert builtin.__module__ == "builtins"
    for caught in (errors.AdaFlashError, builtin):
        with pytest.raises(caught, match="why"):
            raise getattr(errors, name)("why")
