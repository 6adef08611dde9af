from __future__ import annotations

import pytest

from adaflash_hf.error_text import first_line


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no such file."), "no such file"),
        (OSError("\n one \n\n two"), "one"),
        (KeyError("name"), "'name'"),
        (RuntimeError(), "RuntimeError"),
        (RuntimeError("  \n"), "RuntimeError"),
    ],
)
def test_first_line(error: Exception, expected: str) -> None:
    assert first_line(error) == expected
