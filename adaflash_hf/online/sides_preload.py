"""Imports what both sides of `adaflash online` need, for the server process that they are forked from."""

from __future__ import annotations

from ..embedded_target import load_target
from ..generation.engine import AdaFlashEngine
from .inference_process import run_inference
from .online_trainer import OnlineTrainer
from .trainer_process import run_trainer


__all__ = ["AdaFlashEngine", "OnlineTrainer", "load_target", "run_inference", "run_trainer"]
