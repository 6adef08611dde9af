from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError

import adaflash_hf
from adaflash_hf.error_text import first_line, install_hint


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no such file."), "no such file"),
        (OSError("\n one \n\n two"), "one"),
        (KeyError("name"), "'name'"),
        (ValueError("Value error, it must be positive."), "it must be positive"),
        (StrictDataclassFieldValidationError("size", TypeError("'size' is 'a'.")), "'size' is 'a'"),
        (StrictDataclassClassValidationError("sizes", ValueError("63 is odd.\nMore.")), "63 is odd"),
        (ValueError("Validation error for field 'size':"), "Validation error for field 'size':"),
        (RuntimeError(), "RuntimeError"),
        (RuntimeError("  \n"), "RuntimeError"),
    ],
)
def test_first_line(error: Exception, expected: str) -> None:
    assert first_line(error) == expected


def test_install_hint_is_for_clones_and_others() -> None:
    hint = install_hint("bench")
    assert "pip install -e '.[bench]' in the clone" in hint and "pip install 'adaflash-hf[bench]'" in hint
    assert "\n" not in hint


def test_errors_that_name_an_extra_give_that_hint() -> None:
    """One place says how an extra is installed, so that no message is right for some users only."""
    package = Path(adaflash_hf.__file__).parent
    naming = {path.name for path in package.rglob("*.py") if "adaflash-hf[" in path.read_text(encoding="utf-8")}
    assert naming == {"error_text.py"}
