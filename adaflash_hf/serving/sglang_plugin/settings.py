"""What an operator can set about the length head: environment variables, as SGLang's arguments cannot be extended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...errors import InvalidInputError
from ...generation.length_policies import ENGINE_ACTIVATION_CONCURRENCY, LengthHeadPolicy


__all__ = ["MODE_VARIABLE", "PluginSettings", "VerifyMode"]

# SGLang's own variable for verification with lengths of their own; its CUDA graphs read it too.
MODE_VARIABLE = "SGLANG_RAGGED_VERIFY_MODE"
_PREFIX = "ADAFLASH_"


class VerifyMode:
    """The values of `MODE_VARIABLE`.

    `STATIC`, the default of SGLang, verifies whole blocks. `CAP_ACCEPT` does too and then keeps no more than the head
    allows: nothing is saved, every backend can do it, and the head's quality shows. `COMPACT` sends only the rows that
    the head asks for to the target.
    """

    STATIC = "static"
    CAP_ACCEPT = "cap-accept"
    COMPACT = "compact"


@dataclass(frozen=True)
class PluginSettings:
    """
    Args:
        length_scale (`float`, defaults to 1.3): The paper's gamma; `ADAFLASH_LENGTH_SCALE`.
        min_verify_length (`int`, defaults to 2): Least rows, the anchor included; `ADAFLASH_MIN_VERIFY_LENGTH`.
        activation_concurrency (`int`, defaults to 16):
            Requests from which on the head is asked; with fewer, whole blocks are verified;
            `ADAFLASH_ACTIVATION_CONCURRENCY`.
    """

    length_scale: float = 1.3
    min_verify_length: int = 2
    activation_concurrency: int = ENGINE_ACTIVATION_CONCURRENCY

    def __post_init__(self) -> None:
        # The policy of the package's own engine has the same three, and says what is wrong with them.
        LengthHeadPolicy(self.length_scale, self.min_verify_length, self.activation_concurrency)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> PluginSettings:
        """
        Reads the variables.

        Args:
            environment (`Mapping[str, str]`): Such as `os.environ`.

        Raises:
            InvalidInputError: A value is not a number, or not one that is allowed.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = _PREFIX + field.name.upper()
            if name not in environment:
                continue
            kind = float if field.name == "length_scale" else int
            try:
                values[field.name] = kind(environment[name])
            except ValueError as error:
                noun = "a number" if kind is float else "a whole number"
                raise InvalidInputError(
                    f"{name} is {environment[name]!r}, expected {noun}. Correct it, or unset it for "
                    f"{getattr(cls, field.name)}."
                ) from error
        return cls(**values)
