"""Pushes a drafter's directory to the Hugging Face Hub: weights, configuration, sources, card and measurements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .error_text import first_line
from .errors import AdaFlashError, InvalidInputError
from .output_places import disk_error, is_disk_trouble


__all__ = ["add_card_to_pushes", "hub_errors", "reserve_repository", "talking_to_hub", "upload_drafter"]

# Not the records of the run: they hold the paths of the machine it was on.
_UPLOADED = ["README.md", "config.json", "*.safetensors", "*.safetensors.index.json", "*.py", "metrics.json"]
# What stands in every section of transformers' own template.
_BLANK = "[More Information Needed]"


def hub_errors() -> tuple[type[Exception], ...]:
    """What a call to the Hub raises when there is no network, no permission, no such repository or no valid name."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The Hub's client has changed its HTTP library more than once; its own error always derives from that library's.
    return (*HfHubHTTPError.__bases__, HFValidationError, OSError)


def reserve_repository(repo_id: str, *, private: bool = False) -> None:
    """
    Create a repository unless it is there, so that a missing permission shows before the work and not after it.

    Args:
        repo_id (`str`):
            `org/name`.
        private (`bool`, *optional*, defaults to `False`):
            Of a new repository.

    Raises:
        InvalidInputError: the Hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi, constants

    try:
        HfApi().create_repo(repo_id, private=private or None, exist_ok=True)
    except hub_errors() as error:
        reason = first_line(error)
        raise InvalidInputError(
            f"`push_to_hub` is {repo_id!r}, and that repository can be neither found nor created ({reason}). See "
            f"that {constants.ENDPOINT} can be reached, and log in with `hf auth login` to an account that may write "
            "there; or leave the push for later."
        ) from error


@contextmanager
def talking_to_hub(repo_id: str) -> Iterator[None]:
    """
    A block that uploads to a repository, or reads it back; where that fails, it says what to do.

    Args:
        repo_id (`str`):
            `org/name`.

    Raises:
        InvalidInputError: the Hub refuses or cannot be reached.
    """
    from huggingface_hub import constants

    try:
        yield
    except hub_errors() as error:
        trouble = disk_error(error)
        if isinstance(error, AdaFlashError) or (trouble is not None and is_disk_trouble(trouble)):
            raise
        raise InvalidInputError(
            f"The Hub's repository is {repo_id!r}, and exchanging files with it failed ({first_line(error)}). What "
            f"was to be pushed is still here: see that {constants.ENDPOINT} can be reached, and push again."
        ) from error


def upload_drafter(directory: str | Path, repo_id: str) -> str:
    """
    Push a drafter's directory in one commit.

    Args:
        directory (`str` or `Path`):
            What `save_pretrained` or `adaflash train` wrote.
        repo_id (`str`):
            Repository, which must exist; see [`reserve_repository`].

    Returns:
        `str`: address of the commit.

    Raises:
        InvalidInputError: the Hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    with talking_to_hub(repo_id):
        commit = HfApi().upload_folder(
            repo_id=repo_id,
            folder_path=directory,
            allow_patterns=_UPLOADED,
            ignore_patterns=["*/*"],
            commit_message="Upload drafter",
        )
    return str(commit.commit_url)


def add_card_to_pushes(model_class: type) -> None:
    """
    Have `model.push_to_hub()` write a drafter's card where the repository has none yet but transformers' blank one.

    The file of the model cannot do this itself: on the Hub it lies beside the weights and runs without the package.

    Args:
        model_class (`type`):
            The drafter's class.
    """
    upload: Any = model_class._upload_modified_files  # type: ignore[attr-defined]

    def upload_with_card(self: Any, working_dir: str | Path, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        _replace_blank_card(Path(working_dir), repo_id, self.name_or_path)
        return upload(self, working_dir, repo_id, *args, **kwargs)

    model_class._upload_modified_files = upload_with_card  # type: ignore[attr-defined]


def _replace_blank_card(directory: Path, repo_id: str, name_or_path: str) -> None:
    from .model_card import CARD_FILE, CardOptions, is_generated_card, write_drafter_card

    path = directory / CARD_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not text or is_generated_card(text) or _BLANK in text:
        records = name_or_path if Path(name_or_path or "").is_dir() else None
        write_drafter_card(directory, CardOptions(repo_id=repo_id, records=records))
