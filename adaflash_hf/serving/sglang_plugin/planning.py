"""How many rows of each block are verified, and what that leaves of a verdict on the whole block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...generation.length_policies import scaled_verify_lengths
from ...modeling_length_head import LengthHeadModel
from .settings import MODE_VARIABLE, PluginSettings, VerifyMode


__all__ = ["LengthPlanner", "cap_verdicts"]


@dataclass(frozen=True)
class LengthPlanner:
    """
    Asks the length head, where that is worth it.

    Args:
        head (`LengthHeadModel`, *optional*): The drafter's head.
        block_size (`int`): Rows of a block, the anchor included.
        mode (`str`): One of `VerifyMode`.
        settings (`PluginSettings`): Scale, minimum, and from how many requests on.
        max_running_requests (`int`, *optional*): Most requests that SGLang runs at a time.
    """

    head: LengthHeadModel | None
    block_size: int
    mode: str
    settings: PluginSettings
    max_running_requests: int | None = None

    @property
    def why_off(self) -> str | None:
        """Why no request will ever be verified by the head; None if it will."""
        least, most = self.settings.activation_concurrency, self.max_running_requests
        if self.head is None:
            return "the drafter has none"
        if self.mode == VerifyMode.STATIC:
            return (
                f"{MODE_VARIABLE} is {VerifyMode.STATIC!r}; set it to {VerifyMode.COMPACT!r}, or for tests to "
                f"{VerifyMode.CAP_ACCEPT!r}"
            )
        if most is not None and most < least:
            return (
                f"it works from {least} requests on (ADAFLASH_ACTIVATION_CONCURRENCY), and no more than {most} run at "
                "a time (--max-running-requests)"
            )
        return None

    def describe(self) -> str:
        """One line for the log: whether the head is on, and how."""
        if self.why_off is not None:
            return f"AdaFlash length head: off, whole blocks of {self.block_size} rows are verified: {self.why_off}."
        settings = self.settings
        most = "" if self.max_running_requests is None else f" of at most {self.max_running_requests}"
        return (
            f"AdaFlash length head: on, mode {self.mode}, length_scale {settings.length_scale:g}, "
            f"{settings.min_verify_length} to {self.block_size} rows, from {settings.activation_concurrency} running "
            f"requests{most} on."
        )

    def is_active(self, num_requests: int) -> bool:
        """Whether the head is asked in a round of so many requests."""
        return self.why_off is None and num_requests >= self.settings.activation_concurrency

    def verify_lengths(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(num_requests * block_size, hidden_size)`):
                The drafter's, after its final norm.

        Returns:
            `torch.Tensor` of shape `(num_requests,)`: int64, on the same device; nothing waits for it.
        """
        blocks = hidden_states.view(-1, self.block_size, hidden_states.shape[-1])  # [N, B, H]
        if not self.is_active(blocks.shape[0]):
            return torch.full((blocks.shape[0],), self.block_size, dtype=torch.int64, device=blocks.device)
        assert self.head is not None
        lengths = scaled_verify_lengths(
            self.head(blocks.to(self.head.dtype)).ratio,
            self.block_size,
            self.settings.length_scale,
            min_verify_length=self.settings.min_verify_length,
        )
        return lengths.long()


def cap_verdicts(
    candidates: torch.Tensor, accepted: torch.Tensor, bonus: torch.Tensor, verify_lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The verdict on the first rows of a block, made of the verdict on all of it.

    With L rows verified at most L - 1 drafts are accepted, and row L - 1 gives the token after them. If draft L was
    accepted, it is that token: the target's choice at row L - 1 under greedy decoding, and under sampling the draw
    that the acceptance test stands for. So rows from L on need not have been computed.

    Args:
        candidates (`torch.Tensor` of shape `(num_requests, block_size)`): Anchors and drafts.
        accepted (`torch.Tensor` of shape `(num_requests,)`): Drafts accepted, whatever was in rows from L on.
        bonus (`torch.Tensor` of shape `(num_requests,)`): The target's token after them.
        verify_lengths (`torch.Tensor` of shape `(num_requests,)`): L, the anchor included.

    Returns:
        `tuple`: accepted drafts and the token after them, of the same shapes and dtypes.
    """
    most = (verify_lengths - 1).to(accepted.dtype)
    # An L of the whole block caps nothing, and there is no draft L to look at.
    next_draft = candidates.gather(1, verify_lengths.clamp(max=candidates.shape[1] - 1).long()[:, None])[:, 0]
    return torch.minimum(accepted, most), torch.where(accepted > most, next_draft.to(bonus.dtype), bonus)
