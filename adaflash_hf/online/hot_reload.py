"""Swaps a serving drafter's weights for newer ones between two rounds, under load, without touching the target.

A thread watches the publish directory, reads a new version into a second copy of the drafter, checks it and tries it
on recent traffic. The decoding thread then only copies tensors, at the next moment between two rounds. Whatever goes
wrong with a version, the one in use stays in use and the reason is kept.

Output stays what it was: the target decides every token, whoever drafts. Requests that are running keep the context
keys and values that older weights made of the target's hidden states: their drafts may be a little worse until they
end, and never wrong. Making them anew would cost each running request another prefill.

If several threads decode with one drafter at once, one of them may be drafting while another one swaps; that round's
drafts may be poor, and are verified as always. Not covered: drafters wrapped by PEFT, quantised, sharded or offloaded,
and targets that several processes run together.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidInputError, PublishedVersionError
from ..generation.compatibility import unwrap_model
from ..generation.drafter_hooks import hooks_of
from ..generation.prepacking import restore_linear_layers
from ..openmp_workers import release_openmp_workers
from .probe import AcceptanceProbe, ProbeScore
from .published_versions import PublishedVersion, PublishedVersions, VersionManifest, VersionPointer
from .version_checks import check_configuration, read_weights


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["HotReloader", "ReloadStatus"]

logger = logging.getLogger(__name__)

# Below this, chance decides: with 36 blocks tried, sound weights are not refused for being unlucky three times.
_SLACK = 3


@dataclass
class ReloadStatus:
    """
    What a reloader has done.

    Attributes:
        version: The version in use.
        reloads: Swaps so far.
        refused: Versions that were not taken, and why.
        waiting_for: Why a newer version is not in use yet, if there is one.
        error: What keeps the publish directory from being read, if anything.
        prepare_s: Seconds in which the newest version was read and tried, beside decoding.
        pause_s: Seconds for which the newest swap held decoding up.
        longest_pause_s: The longest such pause.
    """

    version: int = 0
    reloads: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    waiting_for: str = ""
    error: str = ""
    prepare_s: float = 0.0
    pause_s: float = 0.0
    longest_pause_s: float = 0.0


# Requests of the probe, and how some weights did on each.
_Scores = list[tuple[dict[str, torch.Tensor], ProbeScore]]


@dataclass(frozen=True)
class _Candidate:
    """Weights that wait, in the second copy, for the next moment between two rounds."""

    version: int
    scores: _Scores


class HotReloader:
    """
    Keeps a serving drafter up to date.

        reloader = HotReloader(drafter, target, "published")
        reloader.attach()                   # generate(assistant_model=drafter)
        reloader.attach_engine(engine)      # AdaFlashEngine
        with reloader: ...                  # watches meanwhile

    Args:
        drafter (`DFlashDrafterModel`):
            The drafter in use; `torch.compile` may wrap it.
        target (`PreTrainedModel`):
            Its target.
        directory (`str` or `Path`):
            Where versions are published; need not exist yet.
        version (`int`, *optional*, defaults to 0):
            Version of the drafter's weights now.
        poll_s (`float`, *optional*, defaults to 0.5):
            Seconds between two looks at the directory.
        min_relative_acceptance (`float`, *optional*, defaults to 0.5):
            A version that accepts less than this share of what the one in use accepts on recent traffic is refused.
        probe (`AcceptanceProbe`, *optional*):
            Recent traffic to try versions on.
        min_probe_blocks (`int`, *optional*, defaults to 16):
            With fewer blocks to try a version on, the trainer's own verdict decides; without one, it waits.

    Raises:
        InvalidInputError: The drafter cannot be swapped in place.
    """

    def __init__(
        self,
        drafter: Any,
        target: PreTrainedModel,
        directory: str | Path,
        *,
        version: int = 0,
        poll_s: float = 0.5,
        min_relative_acceptance: float = 0.5,
        probe: AcceptanceProbe | None = None,
        min_probe_blocks: int = 16,
    ) -> None:
        self.drafter: DFlashDrafterModel = unwrap_model(drafter)
        _check_swappable(self.drafter)
        self.versions = PublishedVersions(directory)
        config = self.drafter.config
        self.probe = probe or AcceptanceProbe(target, config.target_layer_ids, config.draft_length)
        self._min_relative_acceptance, self._min_probe_blocks = min_relative_acceptance, min_probe_blocks
        self._poll_s = poll_s
        self._status = ReloadStatus(version=version)
        # Equal to the drafter whenever no candidate waits.
        self._copy = copy.deepcopy(self.drafter).eval().requires_grad_(False)
        self._copy.draft_token_ids = self.drafter.draft_token_ids
        restore_linear_layers(self._copy)
        if "flash" in (self._copy.config._attn_implementation or ""):
            self._copy.set_attn_implementation("sdpa")  # blocks that share a forward pass need a mask of their own
        self._tensors = _floating_tensors(self.drafter, self._copy)
        self._probe_failed = False
        self._lock = threading.Lock()
        self._candidate: _Candidate | None = None
        self._scores: _Scores = []  # of the weights in use, as far as they were tried
        self._refused_pointer: VersionPointer | None = None
        self._detach: list[Callable[[], None]] = []
        self._version_holders: list[Any] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def status(self) -> ReloadStatus:
        """What has been done so far."""
        with self._lock:
            return copy.deepcopy(self._status)

    @property
    def version(self) -> int:
        """The version in use."""
        return self._status.version

    # Serving side

    def attach(self) -> None:
        """Swap between the rounds of `generate()` calls that use the drafter."""
        self._attach(hooks_of(self.drafter))

    def attach_engine(self, engine: Any) -> None:
        """
        Swap between the rounds of an engine.

        Args:
            engine (`AdaFlashEngine`):
                The engine; its drafter must be the reloader's.
        """
        if engine.drafter is None or unwrap_model(engine.drafter) is not self.drafter:
            raise InvalidInputError(
                "`engine` does not draft with the drafter that this reloader changes; make the engine with that one."
            )
        self._attach(engine)

    def between_rounds(self) -> None:
        """Swap if a checked version waits. Called while no model is in use."""
        if self._candidate is not None:
            self._swap()
        if not self._probe_failed:
            try:
                self.probe.refresh()
            except Exception:
                self._probe_failed = True
                logger.exception("Versions cannot be tried on traffic; the trainer's verdict decides alone.")

    def start(self) -> HotReloader:
        """Watch the directory in a thread from now on."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._watch, name="adaflash-reload", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread and all that was attached; the version in use stays."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for detach in self._detach:
            detach()
        self._detach.clear()

    def __enter__(self) -> HotReloader:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def check(self) -> bool:
        """
        Look at the directory once, in the calling thread.

        Returns:
            `bool`: whether a version now waits for the next moment between two rounds.
        """
        try:
            pointer = self.versions.pointer()
        except PublishedVersionError as error:
            self._note_error(str(error))
            return False
        with self._lock:
            waiting = self._candidate
            if waiting is not None and pointer is not None and waiting.version == pointer.version:
                return True
            self._candidate = None
        if waiting is not None:
            self._restore_copy()  # another version is wanted by now
        if pointer is None or pointer.version == self.version:
            self._status.waiting_for = self._status.error = ""
            return False
        return pointer != self._refused_pointer and self._prepare(pointer)

    # Watching side

    def _watch(self) -> None:
        while not self._stopping.wait(self._poll_s):
            try:
                self.check()
            except Exception as error:
                # Serving must outlive whatever is wrong with this thread's work.
                logger.exception("Checking for a new drafter version failed; the one in use stays.")
                self._note_error(f"{type(error).__name__}: {error}")
            finally:
                release_openmp_workers()

    def _prepare(self, pointer: VersionPointer) -> bool:
        began_s = time.perf_counter()
        try:
            version = self.versions.get(pointer.version)
            if (reason := self._cannot_judge(version.manifest, pointer)) is not None:
                self._status.waiting_for = reason
                return False
            scores = self._fill_copy(version, pointer)
        except PublishedVersionError as error:
            if self._is_overtaken(pointer):
                return False
            # A file that could not be read may be readable next time; anything else is wrong for good.
            if isinstance(error.__cause__, OSError):
                self._note_error(str(error))
            else:
                self._refuse(pointer, str(error))
            return False
        _synchronize(self.drafter.device)
        with self._lock:
            self._status.prepare_s = time.perf_counter() - began_s
            self._status.waiting_for, self._status.error = "the next round", ""
            self._candidate = _Candidate(pointer.version, scores)
        return True

    def _is_overtaken(self, pointer: VersionPointer) -> bool:
        """Whether another version is wanted by now: this one may have been removed while it was read."""
        try:
            return self.versions.pointer() != pointer
        except PublishedVersionError:
            return False

    def _cannot_judge(self, manifest: VersionManifest, pointer: VersionPointer) -> str | None:
        """Why it is too early to say whether a version is sound; None if it is not."""
        blocks = self.probe.num_blocks
        if pointer.is_forced or manifest.version == 0 or blocks >= self._min_probe_blocks:
            return None
        before, after = manifest.acceptance_before.get("all"), manifest.acceptance_after.get("all")
        if before is not None and after is not None and after >= before:
            return None  # the trainer's verdict
        return f"traffic to try version {manifest.version} on ({blocks} of {self._min_probe_blocks} blocks)"

    def _fill_copy(self, version: PublishedVersion, pointer: VersionPointer) -> _Scores:
        """Puts a version's weights into the second copy, if those are sound; else leaves the ones in use there."""
        version.check_files()
        check_configuration(version.path, self._copy.config)
        weights = read_weights(version.path, self._copy.state_dict())
        traffic = [] if pointer.is_forced else self.probe.kept()
        in_use = self._scores_on(traffic, self._scores)
        self._scores = self._scores if pointer.is_forced else in_use
        current = ProbeScore.total(score for _, score in in_use)
        _synchronize(self.drafter.device)  # an earlier swap may still be reading
        try:
            _copy_tensors([(copied, weights[name]) for name, _, copied in self._tensors])
            if current.blocks < self._min_probe_blocks:
                return []
            scores = self._scores_on(traffic, [])
            self._compare(version, current, ProbeScore.total(score for _, score in scores))
            return scores
        except BaseException:
            self._restore_copy()
            raise

    def _scores_on(self, traffic: list[dict[str, torch.Tensor]], known: _Scores) -> _Scores:
        """How the second copy does on each request; on one whose score is known it is not tried again."""
        scores = {id(request): score for request, score in known}
        for request in traffic:
            if id(request) not in scores:
                scores[id(request)] = self.probe.measure(self._copy, request)
        return [(request, scores[id(request)]) for request in traffic]

    def _compare(self, version: PublishedVersion, current: ProbeScore, new: ProbeScore) -> None:
        if new.accepted + _SLACK < self._min_relative_acceptance * current.accepted:
            raise PublishedVersionError(
                f"Version {version.version} accepts {new.accepted} drafts on {new.blocks} recent blocks, version "
                f"{self.version} {current.accepted}; it must reach {self._min_relative_acceptance:.0%}. Its weights "
                "are broken or made for another target."
            )

    def _restore_copy(self) -> None:
        """Back to the weights in use, which are only read."""
        _copy_tensors([(copied, live) for _, live, copied in self._tensors])

    def _refuse(self, pointer: VersionPointer, reason: str) -> None:
        self._refused_pointer = pointer
        with self._lock:
            self._status.refused[pointer.version] = reason
            self._status.waiting_for = ""
        logger.warning("Drafter version %d is not taken, %d stays in use: %s", pointer.version, self.version, reason)

    def _note_error(self, message: str) -> None:
        if message != self._status.error:
            logger.warning("%s Drafter version %d stays in use.", message, self.version)
        self._status.error = message

    # Decoding side

    def _attach(self, hooks: Any) -> None:
        hooks.drafter_version = self.version
        self._version_holders.append(hooks)
        self._detach += [hooks.between_rounds(self.between_rounds), hooks.on_finished(self.probe.offer)]

    def _swap(self) -> None:
        with self._lock:
            candidate = self._candidate
            if candidate is None:
                return
            began_s = time.perf_counter()
            _copy_tensors([(live, copied) for _, live, copied in self._tensors])
            self._candidate, self._scores = None, candidate.scores
            pause_s = time.perf_counter() - began_s
            status = self._status
            status.version, status.reloads, status.waiting_for = candidate.version, status.reloads + 1, ""
            status.pause_s, status.longest_pause_s = pause_s, max(status.longest_pause_s, pause_s)
            for holder in self._version_holders:
                holder.drafter_version = candidate.version
        logger.info("Drafter version %d is in use; the swap took %.4f s.", candidate.version, pause_s)


def _check_swappable(drafter: Any) -> None:
    kinds = {type(tensor) for tensor in drafter.parameters()}
    if kinds != {torch.nn.Parameter} or any(tensor.is_meta for tensor in drafter.parameters()):
        raise InvalidInputError(
            f"`drafter` has parameters of the kinds {sorted(kind.__name__ for kind in kinds)}, some without values "
            "perhaps; in place only plain ones can be exchanged. Load it unquantised on one device."
        )
    if hasattr(drafter, "peft_config") or getattr(drafter, "_hf_peft_config_loaded", False):
        raise InvalidInputError(
            "`drafter` carries a PEFT adapter, but published versions are whole drafters; merge it first with "
            "`adaflash_hf.training.lora.merge_lora`."
        )


def _floating_tensors(
    drafter: torch.nn.Module, other: torch.nn.Module
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name and both tensors of all that is swapped."""
    theirs = other.state_dict()
    return [(n, tensor, theirs[n]) for n, tensor in drafter.state_dict().items() if tensor.dtype.is_floating_point]


def _copy_tensors(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Into the memory that is there, so that compiled code, captured graphs and views stay valid."""
    # Not under inference mode, where what watches versions of tensors (prepacked layers) would not notice.
    with torch.inference_mode(False), torch.no_grad():
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
