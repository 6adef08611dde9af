"""Loading from the Hugging Face Hub where it may not be reachable: what is cached, or nowhere, shows at once."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from .error_text import first_line
from .errors import InvalidInputError
from .hub_upload import hub_errors


__all__ = [
    "hub_or_cache",
    "is_missing_directory",
    "loading_checkpoint",
    "refuse_missing_directory",
    "why_not_from_hub",
]

logger = logging.getLogger(__name__)

_told: set[tuple[str, str]] = set()


@contextmanager
def hub_or_cache(name_or_path: str | os.PathLike[str]) -> Iterator[None]:
    """
    A block that loads a model. If the Hub does not answer now, the block works offline, as with `HF_HUB_OFFLINE=1`.

    The Hub's client tries every file that is not in its cache six times, half a minute long, and a model that was
    loaded before has several optional ones that do not exist: minutes for what is on the disk or nowhere.

    Args:
        name_or_path (`str` or `os.PathLike`):
            What is loaded; for a directory nothing is asked.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if not before and not os.path.exists(name_or_path):
        constants.HF_HUB_OFFLINE = not _answers(str(name_or_path))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def is_missing_directory(name_or_path: str, *, may_lack_owner: bool = False) -> bool:
    """
    Whether this can only be meant as a directory, and is none: the Hub would be asked for it, for a long time.

    Args:
        name_or_path (`str`):
            What the user gave.
        may_lack_owner (`bool`, *optional*, defaults to `False`):
            Whether a single word may be a repository, as `gpt2` is.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return False
    if path.is_absolute() or name_or_path.startswith((".", "~")):
        return True
    if len(path.parts) == 2:
        return Path(path.parts[0]).is_dir()
    return len(path.parts) > 2 or not may_lack_owner


@contextmanager
def loading_checkpoint(name_or_path: str, option: str) -> Iterator[None]:
    """
    A block that loads the drafter or head that an option names; where there is none, it says so by that option.

    Args:
        name_or_path (`str`):
            Hub id or directory.
        option (`str`):
            As it is written on the command line.
    """
    from .embedded_target import without_progress_bars

    refuse_missing_directory(name_or_path, option)
    try:
        # Downloads keep their bars.
        with without_progress_bars() if Path(name_or_path).is_dir() else nullcontext(), hub_or_cache(name_or_path):
            yield
    except OSError as error:
        reason = first_line(error)
        if not os.path.exists(name_or_path):
            reason = f"there is no such directory here, and {why_not_from_hub(error)}"
        raise _cannot_be_loaded(name_or_path, option, reason) from error


def why_not_from_hub(error: BaseException) -> str:
    """
    Why something did not come from the Hub. To be asked after [`hub_or_cache`], which may have gone offline by itself.

    Args:
        error (`BaseException`):
            Of whoever loaded it.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so that only the Hub's cache was asked, which lacks it"
    return f"from the Hub: {first_line(error)}"


def refuse_missing_directory(name_or_path: str, option: str) -> None:
    """Say by the option that names a drafter or head that there is no such directory."""
    if is_missing_directory(name_or_path):
        raise _cannot_be_loaded(name_or_path, option, "there is no such directory here")


def _cannot_be_loaded(name_or_path: str, option: str, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"`{option}` is {name_or_path!r} and cannot be loaded ({reason}). Pass a directory with a config.json and "
        "model.safetensors, or a Hub id as 'org/name'."
    )


def _answers(name: str) -> bool:
    """Whether anybody answers, be it that there is no such repository."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (HfHubHTTPError, HFValidationError):
        return True
    except hub_errors() as error:
        if (name, constants.ENDPOINT) not in _told:  # a command loads a model in several parts
            _told.add((name, constants.ENDPOINT))
            text = "There is no directory %r here, and no connection to %s (%s); its cache is used."
            logger.warning(text, name, constants.ENDPOINT, first_line(error))
        return False
    return True
