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


class DrafterExportError(AdaFlashError, RuntimeError):
    """A drafter cannot be written: the format or engine cannot hold it, or the place cannot be written to."""


class OutputError(AdaFlashError, OSError):
    """Results cannot be written where they were asked for: full disk, read-only place, something else in the way."""


class ServerError(AdaFlashError, RuntimeError):
    """A running inference server cannot be reached, refuses, or has done something else than it was asked for."""


class UnsupportedGenerationError(AdaFlashError, ValueError):
    """A `generate()` option, target or cache cannot be served; raised before the first token."""


class MissingDependencyError(AdaFlashError, ImportError):
    """An optional dependency is needed for what was asked and is not installed."""


class TrainingDivergedError(AdaFlashError, ArithmeticError):
    """A loss, a gradient or a weight is no finite number any more: what was trained is worthless."""


class EngineQueueFullError(AdaFlashError, RuntimeError):
    """An engine has as many waiting requests as it was told to hold: try again later, or elsewhere."""


class EngineStoppedError(AdaFlashError, RuntimeError):
    """An engine has stopped, or failed, and takes and finishes no requests."""


class ReplayBufferError(AdaFlashError, OSError):
    """A replay buffer cannot be read or written: full disk, read-only place, damaged file, too long a wait."""


class PublishedVersionError(AdaFlashError, ValueError):
    """A version of a drafter cannot be published or must not be loaded."""


__all__ = [
    "AdaFlashError",
    "DrafterCheckpointError",
    "DrafterCompatibilityError",
    "DrafterExportError",
    "EngineQueueFullError",
    "EngineStoppedError",
    "InvalidInputError",
    "MissingDependencyError",
    "OutputError",
    "PublishedVersionError",
    "ReplayBufferError",
    "ServerError",
    "TrainingDivergedError",
    "UnsupportedGenerationError",
]
