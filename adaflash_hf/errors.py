"""Exceptions of this package. Each message names the value received, what was expected and what to do next."""

from __future__ import annotations


class AdaFlashError(Exception):
    """Base class: catch it to catch everything this package raises on purpose."""


class InvalidInputError(AdaFlashError, ValueError):
    """An argument or a configuration value is outside what is allowed."""


class DrafterCheckpointError(AdaFlashError, ValueError):
    """A drafter checkpoint cannot be read: wrong format, incomplete, mis-shaped or damaged."""


class DrafterCompatibilityError(AdaFlashError, ValueError):
    """A drafter is sound in itself but does not fit the target model it is used with."""


class UnsupportedGenerationError(AdaFlashError, ValueError):
    """A `generate()` option, target or cache cannot be served; raised before the first token."""


class MissingDependencyError(AdaFlashError, ImportError):
    """An optional dependency is needed for what was asked and is not installed."""


__all__ = [
    "AdaFlashError",
    "DrafterCheckpointError",
    "DrafterCompatibilityError",
    "InvalidInputError",
    "MissingDependencyError",
    "UnsupportedGenerationError",
]
