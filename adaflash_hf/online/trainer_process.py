"""The trainer's process of `adaflash online`."""

from __future__ import annotations

import os

from .replay_buffer import ReplayBuffer
from .run_settings import SideSettings, TrainerSettings
from .side_process import SideProcess


__all__ = ["run_trainer"]

# On processors that both sides share, decoding comes first.
_NICENESS = 10


def run_trainer(settings: TrainerSettings) -> None:
    """
    Train until SIGTERM, or until the rounds that were asked for are done.

    Args:
        settings (`TrainerSettings`):
            All settings.
    """
    process = SideProcess("trainer", settings.side.publish_dir, settings.side.threads)
    with process.running():
        _train(settings, process)


def _train(settings: TrainerSettings, process: SideProcess) -> None:
    from ..embedded_target import load_target, without_progress_bars
    from ..hub_connection import loading_checkpoint
    from ..modeling_dflash_drafter import DFlashDrafterModel
    from .online_trainer import OnlineTrainer
    from .publisher import Publisher
    from .run_status import StatusFile

    side = settings.side
    publisher = Publisher(side.publish_dir, settings.keep_versions)
    StatusFile(side.publish_dir, "trainer").update(phase="loading", error="")
    with without_progress_bars():
        target = load_target(side.target, side.dtype, device=side.device).model
        # In the dtype that it is stored in, which is what versions are published in.
        with loading_checkpoint(side.drafter, "--drafter"):
            drafter = DFlashDrafterModel.from_pretrained(side.drafter)
        if target.device.type == "cpu":
            os.nice(_NICENESS)
        trainer = OnlineTrainer(
            drafter, target, _open_buffer(side), publisher, settings.arguments, poll_s=settings.poll_s
        )
        process.on_stop(trainer.stop)
        trainer.run(settings.max_rounds)


def _open_buffer(side: SideSettings) -> ReplayBuffer:
    """As it is if it is there, for example filled by a collector, else a new one."""
    return ReplayBuffer(side.buffer, side.buffer_settings, takes_existing=True)
