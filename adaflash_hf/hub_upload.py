"""Pushes a drafter's directory to the Hugging Face Hub: weights, configuration, sources, card and measurements."""

from __future__ import annotations

from pathlib import Path

from .errors import InvalidInputError


__all__ = ["hub_errors", "reserve_repository", "upload_drafter"]

# Not the records of the run: they hold the paths of the machine it was on.
_UPLOADED = ["README.md", "config.json", "*.safetensors", "*.safetensors.index.json", "*.py", "metrics.json"]


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
    except hub_errors() as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InvalidInputError(
            f"`push_to_hub` is {repo_id!r}, and that repository can be neither found nor created ({reason}). Log in "
            "with `hf auth login` to an account that may write there, or leave the option out and push later."
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
    """
    from huggingface_hub import HfApi

    commit = HfApi().upload_folder(
        repo_id=repo_id,
        folder_path=directory,
        allow_patterns=_UPLOADED,
        ignore_patterns=["*/*"],
        commit_message="Upload drafter",
    )
    return str(commit.commit_url)
