"""Online adaptation in one process, a round at a time: what `adaflash online` does in two, without waiting."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ReplayBufferError
from ..online.hot_reload import HotReloader
from ..online.online_arguments import OnlineTrainingArguments
from ..online.online_trainer import OnlineTrainer
from ..online.probe import AcceptanceProbe
from ..online.publisher import Publisher
from ..online.recorder import TrajectoryRecorder
from ..online.replay_buffer import BufferSettings, ReplayBuffer
from ..online.round_training import StoredOutputs
from .domain_serving import Server


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["DomainAdaptation"]


class DomainAdaptation:
    """
    Recorder, replay buffer, trainer, publisher and hot reload of one run.

    Args:
        target (`PreTrainedModel`):
            The target.
        start (`DFlashDrafterModel`):
            What is served now; stays as it is.
        server (`Server`):
            Who serves; its drafter's weights are exchanged.
        arguments (`OnlineTrainingArguments`):
            How to train, and whether a round is judged before it is served.
        workspace (`Path`):
            Directory for buffer and versions.
        max_requests (`int`):
            Requests of the whole run; the buffer keeps them all.
        held_out_share (`float`):
            Share of the prompts that rounds are judged by.
        stored (`Callable`, *optional*):
            See [`RoundTrainer`].
    """

    def __init__(
        self,
        target: PreTrainedModel,
        start: DFlashDrafterModel,
        server: Server,
        arguments: OnlineTrainingArguments,
        workspace: Path,
        *,
        max_requests: int,
        held_out_share: float,
        stored: StoredOutputs | None = None,
    ) -> None:
        rows = 2 * max(max_requests, arguments.round_size)
        limits = BufferSettings(max_rows=rows, held_out_share=held_out_share)
        path, longest = workspace / "buffer.sqlite", arguments.max_tokens
        self.recorder = TrajectoryRecorder(path, limits, max_tokens=longest, max_queue=rows, flush_interval_s=0.02)
        self.buffer = ReplayBuffer(path)
        publisher = Publisher(workspace / "published", keep_versions=2)
        self.trainer = OnlineTrainer(copy.deepcopy(start), target, self.buffer, publisher, arguments, stored=stored)
        self.reloader = _new_reloader(server.drafter, target, publisher, is_guarded=arguments.is_guarded)
        self._server, self._expected, self._is_ready = server, 0, False

    def __enter__(self) -> DomainAdaptation:
        self.recorder.attach_engine(self._server.engine)
        self.reloader.attach_engine(self._server.engine)
        return self

    def __exit__(self, *exc: object) -> None:
        self.reloader.stop()
        self.recorder.close()
        self.buffer.close()

    def adapt(self, num_requests: int, *, is_training: bool) -> dict[str, Any]:
        """
        Train on what came in, and serve what comes of it from now on.

        Args:
            num_requests (`int`):
                Requests since the last call.
            is_training (`bool`):
                Whether to train; else what came in is only kept.

        Returns:
            `dict[str, Any]`: what the trainer's history says of the round; empty without training
        """
        self._expected += num_requests
        self.recorder.flush(timeout_s=60.0)
        counts = self.recorder.counts
        if counts.written + counts.too_short != self._expected:
            raise ReplayBufferError(f"Of {self._expected} requests not all were recorded ({counts}).")
        if not is_training:
            return {}
        if not self._is_ready:
            self.trainer.resume()
            self._is_ready = True
        entry = self.trainer.run_round()
        self.reload()
        status = self.reloader.status
        refusal = status.refused.get(entry["version"], status.waiting_for)
        return {**entry, "refused": refusal} if status.version != entry["version"] else dict(entry)

    def reload(self) -> None:
        """Swap the newest version in, if it is sound."""
        self.reloader.check()
        self.reloader.between_rounds()


def _new_reloader(drafter: Any, target: PreTrainedModel, publisher: Publisher, *, is_guarded: bool) -> HotReloader:
    if is_guarded:
        return HotReloader(drafter, target, publisher.directory)
    # Every round is served, whatever it forgets of the traffic before it: that is what is measured.
    probe = AcceptanceProbe(
        target,
        drafter.config.target_layer_ids,
        drafter.config.draft_length,
        max_requests=1,
        refresh_interval_s=math.inf,
    )
    return HotReloader(
        drafter, target, publisher.directory, min_relative_acceptance=0.0, min_probe_blocks=0, probe=probe
    )
