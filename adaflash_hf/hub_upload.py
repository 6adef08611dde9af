"""Pushes a drafter's directory to the Hugging Face Hub: weights, configuration, sources, card and measurements."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from .error_text import first_line
from .errors import AdaFlashError, InvalidInputError
from .output_places import disk_error, is_disk_trouble


__all__ = [
    "add_card_to_pushes",
    "check_card_on_hub",
    "check_repository_name",
    "hub_errors",
    "reserve_repository",
    "talking_to_hub",
    "upload_drafter",
]

logger = logging.getLogger(__name__)

# Of a model, not of an adapter.
_WEIGHTS = ["model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]
# Not the records of the run: they hold the paths of the machine it was on.
_UPLOADED = ["README.md", "config.json", "*.safetensors", "*.safetensors.index.json", "*.py", "metrics.json"]
# What the Hub's client raises where something answers that is no Hub: a proxy's page, or JSON of another shape.
_NO_HUB_ANSWERS: tuple[type[Exception], ...] = (json.JSONDecodeError, KeyError, TypeError, AttributeError)


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
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repo_id, private=private or None, exist_ok=True)
    except (*hub_errors(), *_NO_HUB_ANSWERS) as error:
        raise InvalidInputError(
            f"`push_to_hub` is {repo_id!r}, and that repository can be neither found nor created ({first_line(error)})"
            f". {_what_to_see()}; or leave the push for later."
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
    try:
        yield
    except (*hub_errors(), *_NO_HUB_ANSWERS) as error:
        trouble = disk_error(error)
        if isinstance(error, AdaFlashError) or (trouble is not None and is_disk_trouble(trouble)):
            raise
        raise InvalidInputError(
            f"The Hub's repository is {repo_id!r}, and exchanging files with it failed ({first_line(error)}). What "
            f"was to be pushed is still here. {_what_to_see()}, and push again."
        ) from error


def _what_to_see() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, which forbids asking it: unset it"
    return (
        f"See that {constants.ENDPOINT} can be reached and is a Hub, and that you are logged in (`hf auth login`) to "
        "an account that may write there"
    )


def check_repository_name(repo_id: str) -> None:
    """
    Refuse what cannot be a repository's name.

    Args:
        repo_id (`str`):
            Should be `org/name`.

    Raises:
        InvalidInputError: it is none.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InvalidInputError(f"`--repo-id` is {repo_id!r} ({first_line(error)}); give it as org/name.") from error


def check_card_on_hub(repo_id: str) -> None:
    """
    Refuse a repository whose card somebody wrote by hand, which a push would replace.

    Args:
        repo_id (`str`):
            Repository, which must exist.

    Raises:
        InvalidInputError: it has one, or cannot be read.
    """
    from .model_card import CARD_FILE

    with talking_to_hub(repo_id):
        is_by_hand = _has_card_by_hand(repo_id)
    if is_by_hand:
        raise InvalidInputError(
            f"The {CARD_FILE} of {repo_id} on the Hub was not written by this command, and what somebody wrote there "
            "would be lost; give --force to replace it, or push to another repository."
        )


def upload_drafter(directory: str | Path, repo_id: str, *, replace_card: bool = False) -> str:
    """
    Push a drafter's directory in one commit, in which weight files of an earlier drafter go that this one lacks.

    Args:
        directory (`str` or `Path`):
            What `save_pretrained` or `adaflash train` wrote.
        repo_id (`str`):
            Repository, which must exist; see [`reserve_repository`].
        replace_card (`bool`, *optional*, defaults to `False`):
            Whether a card goes that somebody wrote there by hand. By default it stays, and that is told.

    Returns:
        `str`: address of the commit.

    Raises:
        InvalidInputError: the Hub refuses or cannot be reached, or the repository has changed meanwhile.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    from .model_card import CARD_FILE

    api, directory = HfApi(), Path(directory)
    with talking_to_hub(repo_id):
        before = api.model_info(repo_id)
        there = {sibling.rfilename for sibling in before.siblings or []}
        keeps_card = not replace_card and CARD_FILE in there and _has_card_by_hand(repo_id, before.sha)
        files = {path.name for path in directory.iterdir() if path.is_file() and _matches(path.name, _UPLOADED)}
        files -= {CARD_FILE} if keeps_card else set()
        stale = _stale_weights(there, files)
        # Not `upload_folder`, which may make several commits of it: a reader in between would get half a drafter.
        commit = api.create_commit(
            repo_id,
            [
                *(CommitOperationDelete(name) for name in sorted(stale)),
                *(CommitOperationAdd(name, directory / name) for name in sorted(files)),
            ],
            commit_message="Upload drafter",
            parent_commit=before.sha,
        )
    if keeps_card:
        logger.warning(
            "The %s of %s was written by hand and stays as it is; `adaflash card --push --force` replaces it.",
            CARD_FILE,
            repo_id,
        )
    return str(commit.commit_url)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _has_card_by_hand(repo_id: str, revision: str | None = None) -> bool:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    from .model_card import CARD_FILE, may_be_replaced

    try:
        path = HfApi().hf_hub_download(repo_id, CARD_FILE, revision=revision)
    except EntryNotFoundError:
        return False
    return not may_be_replaced(Path(path).read_text(encoding="utf-8"))


def add_card_to_pushes(model_class: type) -> None:
    """
    Have `model.push_to_hub()` write a drafter's card where the repository has none yet but transformers' blank one,
    and remove weights of an earlier drafter that would be loaded in place of these.

    The file of the model cannot do this itself: on the Hub it lies beside the weights and runs without the package.

    Args:
        model_class (`type`):
            The drafter's class.
    """
    upload: Any = model_class._upload_modified_files  # type: ignore[attr-defined]

    def upload_with_card(self: Any, working_dir: str | Path, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        _replace_blank_card(Path(working_dir), repo_id, self.name_or_path)
        pushed = upload(self, working_dir, repo_id, *args, **kwargs)
        if not kwargs.get("create_pr"):
            _remove_stale_weights(Path(working_dir), repo_id, kwargs.get("revision"), kwargs.get("token"))
        return pushed

    model_class._upload_modified_files = upload_with_card  # type: ignore[attr-defined]


def _remove_stale_weights(directory: Path, repo_id: str, revision: str | None, token: Any) -> None:
    from huggingface_hub import HfApi

    api = HfApi()
    there = {sibling.rfilename for sibling in api.model_info(repo_id, revision=revision, token=token).siblings or []}
    if stale := _stale_weights(there, {path.name for path in directory.iterdir()}):
        message = "Remove weights of an earlier drafter"
        api.delete_files(repo_id, sorted(stale), revision=revision, token=token, commit_message=message)


def _stale_weights(there: set[str], pushed: set[str]) -> set[str]:
    """What `from_pretrained` would read beside or in place of what is pushed; folders are no business of ours."""
    if not any(_matches(name, _WEIGHTS) for name in pushed):
        return set()
    return {name for name in there - pushed if "/" not in name and _matches(name, _WEIGHTS)}


def _replace_blank_card(directory: Path, repo_id: str, name_or_path: str) -> None:
    from .model_card import CARD_FILE, CardOptions, may_be_replaced, write_drafter_card

    path = directory / CARD_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if may_be_replaced(text):
        records = name_or_path if Path(name_or_path or "").is_dir() else None
        write_drafter_card(directory, CardOptions(repo_id=repo_id, records=records))
