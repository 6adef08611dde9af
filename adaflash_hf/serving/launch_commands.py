"""Commands that serve a target with an exported drafter, with the numbers each engine counts in its own way."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .sglang_plugin.settings import MODE_VARIABLE, VerifyMode


if TYPE_CHECKING:
    from ..configuration_dflash_drafter import DFlashDrafterConfig


__all__ = ["LaunchCommand", "launch_command", "sglang_command", "vllm_command"]

PLAIN_ALGORITHM = "DFLASH"
PLUGIN_ALGORITHM = "ADAFLASH"
# Without it SGLang verifies whole blocks, whatever the length head says.
LENGTH_HEAD_ENVIRONMENT = {MODE_VARIABLE: VerifyMode.COMPACT}
LENGTH_HEAD_NOTE = (
    "The verify mode compact needs an attention backend that knows verify lengths: fa3 on Hopper, fa4 or trtllm_mha "
    "on Blackwell."
)


@dataclass(frozen=True)
class LaunchCommand:
    """
    Args:
        arguments (`list[str]`): The program and its arguments.
        environment (`dict[str, str]`): Variables that have to be set.
        notes (`list[str]`): What else to know before starting it.
    """

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """As one line of shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.arguments)])


def launch_command(format_name: str, config: DFlashDrafterConfig, target: str, drafter: str) -> LaunchCommand | None:
    """
    The command for what an export was made for; None if no server reads the format.

    Args:
        format_name (`str`): The format it was exported in.
        config (`DFlashDrafterConfig`): The drafter.
        target (`str`): Directory or Hub id of the target.
        drafter (`str`): Directory of the export.
    """
    if format_name == "sglang":
        return sglang_command(config, target, drafter, with_plugin=False)
    if format_name == "sglang-plugin":
        command = sglang_command(config, target, drafter, with_plugin=True)
        if config.length_head_config is None:
            return command
        return LaunchCommand(command.arguments, LENGTH_HEAD_ENVIRONMENT, [*command.notes, LENGTH_HEAD_NOTE])
    if format_name == "vllm":
        return vllm_command(config, target, drafter)
    if format_name == "speculators":
        # The files say the rest: target, method and number of drafts.
        return LaunchCommand(["vllm", "serve", drafter, "--dtype", "bfloat16"])
    return None


def sglang_command(config: DFlashDrafterConfig, target: str, drafter: str, *, with_plugin: bool) -> LaunchCommand:
    """
    The command for SGLang. It counts the rows of a block, the anchor included.

    Args:
        config (`DFlashDrafterConfig`): The drafter.
        target (`str`): Directory or Hub id of the target.
        drafter (`str`): Directory of the export.
        with_plugin (`bool`): Algorithm ADAFLASH of this package's plugin instead of SGLang's own DFLASH.
    """
    arguments = [
        *("sglang", "serve", "--model-path", target),
        *("--speculative-algorithm", PLUGIN_ALGORITHM if with_plugin else PLAIN_ALGORITHM),
        *("--speculative-draft-model-path", drafter),
        *("--speculative-num-draft-tokens", str(config.block_size)),
        *("--dtype", "bfloat16"),
    ]
    notes = [
        "Speculation limits SGLang to 48 requests at a time unless --max-running-requests is given.",
        "On Hopper, --attention-backend fa3 is the backend to start with.",
    ]
    return LaunchCommand(arguments, notes=notes)


def vllm_command(config: DFlashDrafterConfig, target: str, drafter: str) -> LaunchCommand:
    """
    The command for vLLM. It counts drafts: the rows of a block without the anchor.

    Args:
        config (`DFlashDrafterConfig`): The drafter.
        target (`str`): Directory or Hub id of the target.
        drafter (`str`): Directory of the export.
    """
    speculation = {"method": "dflash", "model": drafter, "num_speculative_tokens": config.block_size - 1}
    arguments = ["vllm", "serve", target, "--dtype", "bfloat16", "--speculative-config", json.dumps(speculation)]
    has_mixed_layers = len(set(config.layer_types)) > 1
    return LaunchCommand(arguments, environment={"VLLM_USE_V2_MODEL_RUNNER": "1"} if has_mixed_layers else {})
