"""Adapts a drafter to the traffic in a replay buffer, round after round, and publishes what helps.

A round: claim trajectories, judge the weights on held-out traffic, train, judge again. If the held-out acceptance did
not fall, the new weights are saved with the note that the round is done, published, and the round is confirmed in the
buffer. Otherwise the weights go back to what they were. The trainer may be killed between any two of these steps: the
saved state says what is done, so a round is never trained on twice and none is left out.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DrafterCheckpointError, PublishedVersionError, ReplayBufferError, TrainingDivergedError
from ..modeling_dflash_drafter import DFlashDrafterModel
from .online_arguments import OnlineTrainingArguments
from .published_versions import VersionManifest
from .publisher import Publisher, VersionConflictError
from .recorded_trajectory import RecordedTrajectory, fit_for_target
from .replay_buffer import ReplayBuffer
from .round_judgement import judge_round, learning_rate_factor, round_figures, served_acceptance
from .round_training import InterruptedRoundError, RoundResult, RoundTrainer, StoredOutputs
from .run_status import StatusFile
from .time_left import TimeLeft
from .training_state import TrainingProgress, TrainingStateStore
from .version_checks import check_configuration


if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["OnlineTrainer"]

logger = logging.getLogger(__name__)

STATE_DIRECTORY = "trainer-state"
_LONGEST_PAUSE_S = 60.0
_SHOWN_HISTORY = 100


class OnlineTrainer:
    """
    The one consumer of a replay buffer.

    Args:
        drafter (`DFlashDrafterModel`):
            The drafter to begin with; becomes version 0 if nothing is published yet, and is taken over.
        target (`PreTrainedModel`):
            Its target.
        buffer (`ReplayBuffer`):
            Where trajectories come in.
        publisher (`Publisher`):
            Where versions go.
        arguments (`OnlineTrainingArguments`, *optional*):
            All settings.
        state_directory (`str` or `Path`, *optional*):
            Where the training state is kept; by default in the publish directory.
        device (`torch.device` or `str`, *optional*):
            Where to train; by default where the target is.
        published_dtype (`torch.dtype`, *optional*):
            What published weights are rounded to; by default the dtype that `drafter` comes in.
        poll_s (`float`, *optional*, defaults to 1.0):
            Seconds between two looks at the buffer.
        stored (`Callable`, *optional*):
            See [`RoundTrainer`].

    Attributes:
        progress: What has been done so far.
        status: The trainer's status file.

    Raises:
        InvalidInputError: The buffer is too small for the rounds.
        DrafterCompatibilityError: The drafter does not fit the target.
    """

    progress: TrainingProgress

    def __init__(
        self,
        drafter: DFlashDrafterModel,
        target: PreTrainedModel,
        buffer: ReplayBuffer,
        publisher: Publisher,
        arguments: OnlineTrainingArguments | None = None,
        *,
        state_directory: str | Path | None = None,
        device: torch.device | str | None = None,
        published_dtype: torch.dtype | None = None,
        poll_s: float = 1.0,
        stored: StoredOutputs | None = None,
    ) -> None:
        self.arguments = arguments or OnlineTrainingArguments()
        self.arguments.check_buffer(buffer.settings)
        self.target, self.buffer, self.publisher = target, buffer, publisher
        self.store = TrainingStateStore(state_directory or publisher.directory / STATE_DIRECTORY)
        self.status = StatusFile(publisher.directory, "trainer")
        self._device, self._poll_s, self._stored = device, poll_s, stored
        self._dtype = published_dtype or drafter.dtype
        # Configuration and names that every version must have; its weights have no values.
        with torch.device("meta"):
            self._skeleton = DFlashDrafterModel(copy.deepcopy(drafter.config))
        self._skeleton.draft_token_ids = drafter.draft_token_ids
        self._original: DFlashDrafterModel | None = drafter
        self._rounds: RoundTrainer | None = None
        self._stopping = threading.Event()
        self._is_resumed, self._time_left = False, TimeLeft()

    @property
    def model(self) -> Any:
        """The drafter in training, or what PEFT made of it."""
        return self._trainer.model

    @property
    def _trainer(self) -> RoundTrainer:
        assert self._rounds is not None, "call `resume` first"
        return self._rounds

    def stop(self) -> None:
        """End [`run`] soon; an unfinished round is begun anew by the next trainer. For other threads."""
        self._stopping.set()

    def run(self, max_rounds: int | None = None) -> int:
        """
        Train whenever there is enough new traffic, until [`stop`] is called.

        Args:
            max_rounds (`int`, *optional*):
                Return after this many rounds.

        Returns:
            `int`: rounds done.
        """
        done, pause_s = 0, 0.0
        with self.buffer.consumer_lock():
            while not self._stopping.is_set() and (max_rounds is None or done < max_rounds):
                try:
                    if not self._is_resumed:
                        self.resume()
                    self._follow_pointer()
                    if (reason := self.waiting_for()) is None:
                        self.run_round()
                        done += 1
                    else:
                        self._report("waiting", waiting_for=reason, error="", expected_end_s=self._time_left.end_s)
                        self._stopping.wait(self._poll_s)
                    pause_s = 0.0
                except InterruptedRoundError:
                    break
                except (DrafterCheckpointError, ReplayBufferError, PublishedVersionError, OSError) as error:
                    # Weights may be half-way through a round: what is on the disk counts.
                    self._is_resumed = False
                    pause_s = self._pause_after(error, pause_s)
        self._report("stopped", waiting_for="")
        return done

    def waiting_for(self) -> str | None:
        """What is missing for a round; None if nothing is."""
        self.status.fields["looked_s"] = time.time()
        if self.buffer.open_round() is not None:
            return None
        depth, arguments = self.buffer.depth(), self.arguments
        self.status.fields["buffer"] = depth._asdict()
        self._time_left.look_at(depth, arguments)
        if depth.waiting < arguments.round_size:
            return f"{arguments.round_size - depth.waiting} of {arguments.round_size} new trajectories"
        if arguments.is_guarded and depth.held_out < arguments.min_held_out:
            return f"{arguments.min_held_out - depth.held_out} of {arguments.min_held_out} held-out trajectories"
        return None

    # Beginning, also after a kill

    def resume(self) -> None:
        """Go on where the last trainer ended, or begin."""
        self._report("starting")
        self.store.clean()
        if self.publisher.pointer() is None:
            self._publish_original()
        identity = self.buffer.identity()
        self._rounds = None  # two sets of weights at a time would be one too many
        self._rounds = self._new_round_trainer()
        progress = self._load_state()
        if progress is None:
            self.progress = TrainingProgress(buffer=identity)
            self._adopt("begins with")
        else:
            is_same_buffer = progress.buffer == identity
            self.progress = progress if is_same_buffer else replace(progress, buffer=identity, round_id=0)
            if progress.manifest is not None:
                self._publish(progress.round_id if is_same_buffer else None)
        self._follow_pointer()
        opened = self.buffer.open_round()
        if opened is not None and opened.id <= self.progress.round_id:
            self.buffer.confirm(opened.id)
        self._is_resumed = True

    def _publish_original(self) -> None:
        if self._original is None:
            raise PublishedVersionError(
                f"`publish_dir` {str(self.publisher.directory)!r} was emptied while training; start the trainer anew."
            )
        manifest = VersionManifest(0, target=self._skeleton.config.target_model_name_or_path)
        self.publisher.publish(self._original, manifest, base=self._skeleton, dtype=self._dtype)

    def _new_round_trainer(self) -> RoundTrainer:
        """From the version that is served; a state, if there is one, replaces the weights."""
        version = self.publisher.latest()
        assert version is not None
        version.check_files()
        check_configuration(version.path, self._skeleton.config)
        self._original = None
        drafter = DFlashDrafterModel.from_pretrained(version.path, dtype=torch.float32)
        places: dict[str, Any] = {"device": self._device, "base_name_or_path": str(version.path)}
        return RoundTrainer(drafter, self.target, self.arguments, stored=self._stored, **places)

    def _load_state(self) -> TrainingProgress | None:
        try:
            return self.store.load(self._trainer.model, self._trainer.optimizer)
        except DrafterCheckpointError as error:
            # The published weights are there; only the optimizer's averages and the history are lost.
            logger.warning("%s The trainer begins with the latest published version.", error)
            self.status.update(warning=str(error))
            progress = self._progress_without_weights()
            self._rounds = None
            self._rounds = self._new_round_trainer()
            if progress is None:
                return None
            self.progress = progress
            self._adopt("begins with")
            return self.progress

    def _progress_without_weights(self) -> TrainingProgress | None:
        """Which rounds are done is worth knowing even if the weights do not fit. A pending version is given up."""
        try:
            progress = self.store.read_progress()
        except DrafterCheckpointError:
            return None
        if progress is None or progress.manifest is None:
            return progress
        pointer = self.publisher.pointer()
        published = pointer is not None and pointer.version == progress.version
        return replace(progress, manifest=None, round_id=progress.round_id - (0 if published else 1))

    def _follow_pointer(self) -> None:
        """Somebody rolled back: go on from what is served, not from what was withdrawn."""
        pointer = self.publisher.pointer()
        if pointer is not None and self._rounds is not None and pointer.version != self.progress.version:
            self._rounds = None
            self._rounds = self._new_round_trainer()
            self._adopt("goes back to")

    def _adopt(self, verb: str) -> None:
        """Make the served version, whose weights the round trainer has, the state to go on from."""
        version = self.publisher.latest()
        assert version is not None
        logger.info("The trainer %s version %d.", verb, version.version)
        self._trainer.reset_optimizer()
        self._save(
            replace(
                self.progress,
                version=version.version,
                trajectories=dict(version.manifest.trajectories),
                manifest=None,
            )
        )

    # One round

    def run_round(self) -> dict[str, Any]:
        """
        One round, from claiming to confirming.

        Returns:
            `dict[str, Any]`: its entry in the history.

        Raises:
            InterruptedRoundError: [`stop`] was called meanwhile; the round stays open.
        """
        began_s = time.time()
        arguments = self.arguments
        opened = self.buffer.claim(arguments.round_size, balanced=arguments.balanced)
        trajectories = self._fitting(self.buffer.read(opened.trajectory_ids))
        held_out = self._held_out()
        history = self.progress.history
        served = served_acceptance(self.buffer.acceptance(history[-1]["created_s"] if history else 0.0))
        before = self._judge("judging before", held_out)
        result, after, outcome = RoundResult(), before, "unusable"
        rate_factor = learning_rate_factor(arguments, history)
        if trajectories:
            try:
                result = self._train(trajectories, opened.id, rate_factor)
                after = self._judge("judging after", held_out)
                outcome = judge_round(arguments, before, after)
            except TrainingDivergedError as error:
                logger.warning("Round %d is given up: %s", opened.id, error)
                outcome = "diverged"
        entry = {
            "round": opened.id,
            "created_s": began_s,
            "round_s": time.time() - began_s,
            "outcome": outcome,
            "trajectories": dict(Counter(one.domain for one in trajectories)),
            "served": served,
            "learning_rate_factor": rate_factor,
            **round_figures(arguments, before, after, result),
        }
        if outcome == "published":
            self._accept(opened.id, entry, result)
        else:
            self._reject(opened.id, entry)
        return self.progress.history[-1]

    def _accept(self, round_id: int, entry: dict[str, Any], result: RoundResult) -> None:
        version, progress = self.publisher.next_version(), self.progress
        trajectories = dict(Counter(progress.trajectories) + Counter(entry["trajectories"]))
        manifest = VersionManifest(
            version=version,
            parent=progress.version,
            round_id=round_id,
            target=self._skeleton.config.target_model_name_or_path,
            settings=self.arguments.to_dict(),
            trajectories=trajectories,
            acceptance_before=entry["held_out_before"],
            acceptance_after=entry["held_out_after"],
        )
        entry["version"] = version
        self._save(
            progress.with_round(
                entry,
                round_id=round_id,
                version=version,
                updates=progress.updates + result.updates,
                trajectories=trajectories,
                manifest=asdict(manifest),
            )
        )
        self._publish(round_id)
        self.buffer.confirm(round_id)

    def _reject(self, round_id: int, entry: dict[str, Any]) -> None:
        logger.info("Round %d is %s; version %d stays.", round_id, entry["outcome"], self.progress.version)
        self.store.load(self._trainer.model, self._trainer.optimizer)
        entry["version"] = self.progress.version
        self._save(self.progress.with_round(entry, round_id=round_id))
        self.buffer.confirm(round_id)

    def _publish(self, round_id: int | None) -> None:
        """Publishes what the state says is due. If somebody switched versions meanwhile, the round is given back."""
        assert self.progress.manifest is not None
        manifest = VersionManifest(**self.progress.manifest)
        self._report("publishing", version=manifest.version)
        outcome = None
        try:
            self.publisher.publish(self._trainer.model, manifest, base=self._skeleton, dtype=self._dtype)
        except VersionConflictError as error:
            logger.warning("%s The round is trained on again from the version that is served.", error)
            outcome = "withdrawn"
            if round_id is not None:
                self.buffer.abandon(round_id)
        except PublishedVersionError as error:
            if isinstance(error.__cause__, OSError):
                raise
            logger.warning("%s The round is given up.", error)
            outcome = "refused"
        if outcome is not None and self.progress.history:
            self.progress.history[-1]["outcome"] = outcome
        self.progress = replace(self.progress, manifest=None)
        self._follow_pointer()

    def _train(self, trajectories: Sequence[RecordedTrajectory], round_id: int, rate_factor: float) -> RoundResult:
        self._time_left.begin_training()
        # How many there will be is known after the first; until then the file has the number of the round before.
        self._report("training", round=round_id, updates_done=0, updates_total=None)

        def show(done: int, total: int) -> None:
            self._time_left.updated(done, total)
            end_s = self._time_left.end_s
            self.status.update(now=False, updates_done=done, updates_total=total, expected_end_s=end_s)

        return self._trainer.train(
            trajectories, round_id, rate_factor=rate_factor, on_update=show, should_stop=self._stopping.is_set
        )

    def _judge(self, phase: str, held_out: Sequence[RecordedTrajectory]) -> dict[str, float]:
        with self._time_left.judging(is_last=phase == "judging after"):
            if not held_out:
                return {}
            self._report(phase, expected_end_s=self._time_left.end_s)
            return self._trainer.evaluate(held_out, should_stop=self._stopping.is_set)

    def _held_out(self) -> list[RecordedTrajectory]:
        arguments = self.arguments
        if not arguments.is_guarded:
            return []
        return self._fitting(self.buffer.held_out(arguments.held_out, balanced=arguments.balanced))

    def _fitting(self, trajectories: Sequence[RecordedTrajectory]) -> list[RecordedTrajectory]:
        found = fit_for_target(trajectories, self._trainer.vocab_size, self.arguments.max_tokens)
        if len(found) < len(trajectories):
            logger.warning("%d trajectories are of another vocabulary or too long.", len(trajectories) - len(found))
        return found

    # Disk

    def _save(self, progress: TrainingProgress) -> None:
        """Until it succeeds: what has been trained is not thrown away because a disk is full for a while."""
        self._report("saving")
        self._persistently(lambda: self.store.save(self._trainer.model, self._trainer.optimizer, progress))
        self.progress = progress

    def _persistently(self, action: Callable[[], None]) -> None:
        pause_s = 0.0
        while True:
            try:
                return action()
            except OSError as error:
                pause_s = self._pause_after(error, pause_s)
                if self._stopping.is_set():
                    raise InterruptedRoundError from error

    def _pause_after(self, error: Exception, pause_s: float) -> float:
        pause_s = min(max(2 * pause_s, self._poll_s), _LONGEST_PAUSE_S)
        logger.warning("%s Trying again in %.0f s.", error, pause_s)
        self._report("waiting", error=str(error), waiting_for="the disk")
        self._stopping.wait(pause_s)
        return pause_s

    def _report(self, phase: str, **fields: Any) -> None:
        progress = getattr(self, "progress", None)
        if progress is not None:
            fields = {
                "version": progress.version,
                "rounds_done": progress.round_id,
                "updates": progress.updates,
                "trajectories": progress.trajectories,
                "history": progress.history[-_SHOWN_HISTORY:],
            } | fields
        fields = {"expected_end_s": None} | fields
        self.status.update(now=phase != self.status.fields.get("phase"), phase=phase, **fields)
