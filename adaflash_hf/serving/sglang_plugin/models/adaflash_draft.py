"""The drafter inside SGLang: its DFLASH model, with a length head and the list of tokens that may be drafted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.models.dflash import DFlashDraftModel
from torch import nn

from ....configuration_length_head import LengthHeadConfig
from ....errors import DrafterCheckpointError
from ....modeling_length_head import LengthHeadModel
from ...engine_outlook import expected_names
from ...formats.sglang_plugin import FORMAT_VERSION


__all__ = ["AdaFlashDraftModel", "EntryClass"]

Weights = Iterable[tuple[str, torch.Tensor]]


class AdaFlashDraftModel(DFlashDraftModel):
    """Reads what `adaflash export --to sglang-plugin` writes, and refuses everything else.

    Args:
        config (`PreTrainedConfig`): The export's config.json; the contract is in `serving/formats/sglang_plugin.py`.
        quant_config (*optional*): Not supported by DFLASH either.
        prefix (`str`, *optional*): Of parameter names.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        added = getattr(config, "adaflash_config", None) or {}
        if added.get("format_version") != FORMAT_VERSION:
            raise DrafterCheckpointError(
                f"`adaflash_config.format_version` is {added.get('format_version')!r}, expected {FORMAT_VERSION}. "
                "Export the drafter again with this version of the package: adaflash export DRAFTER --to "
                "sglang-plugin OUT"
            )
        self.length_head: LengthHeadModel | None = None
        if added.get("length_head") is not None:
            self.length_head = LengthHeadModel(
                LengthHeadConfig(hidden_size=int(config.hidden_size), **added["length_head"])
            )
        self.draft_token_ids: nn.Parameter | None = None
        if added.get("draft_vocab_size") is not None:
            ids = torch.zeros(int(added["draft_vocab_size"]), dtype=torch.int64)
            # A parameter, as only those can be updated and take part in SGLang's checksums.
            self.draft_token_ids = nn.Parameter(ids, requires_grad=False)
        self._is_loaded = False

    def load_weights(self, weights: Weights) -> None:
        """
        Loads a checkpoint, or later any part of one.

        Args:
            weights (`Iterable[tuple[str, torch.Tensor]]`): Names and tensors.

        Raises:
            DrafterCheckpointError:
                A name that does not belong here, a wrong shape, or at the first time something missing. SGLang itself
                ignores names it does not know and leaves what it misses uninitialised.
        """
        if self._is_loaded:
            # All of it is looked at before any of it is used: the server goes on with what it has.
            weights = list(weights)
            for name, tensor in weights:
                self._check(name, tensor)
        seen: set[str] = set()
        super().load_weights(self._without_own(weights, seen))
        if missing := sorted(self._expected() - seen):
            if not self._is_loaded:
                raise DrafterCheckpointError(
                    f"The drafter's checkpoint lacks {missing[0]} ({len(missing)} tensors). Export it again: adaflash "
                    "export DRAFTER --to sglang-plugin OUT"
                )
        self._is_loaded = True

    def _without_own(self, weights: Weights, seen: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Loads what only this class has, and hands on the rest."""
        own = self._own_parameters()
        for name, tensor in weights:
            bare = self._check(name, tensor)
            seen.add(bare)
            if bare in own:
                own[bare].data.copy_(tensor)
            else:
                yield bare, tensor

    def _check(self, name: str, tensor: torch.Tensor) -> str:
        """The name as this class has it."""
        bare, own = name.removeprefix("model."), self._own_parameters()
        shape = tuple(own[bare].shape) if bare in own else self._shape_of(bare)
        if shape is not None and tuple(tensor.shape) != shape:
            raise DrafterCheckpointError(
                f"`{name}` has shape {tuple(tensor.shape)}; this drafter's is {shape}. A drafter of other sizes needs "
                "a server of its own."
            )
        if bare not in own and bare not in self._expected() and not self._is_bias(bare):
            raise DrafterCheckpointError(
                f"`{name}` is no tensor of this drafter. Send the weights of an export with --to sglang-plugin, with "
                'selector "draft".'
            )
        return bare

    def _shape_of(self, name: str) -> tuple[int, ...] | None:
        # Projections are fused and split among ranks here, so only what stays whole can be compared.
        parameter = dict(self.named_parameters()).get(name)
        return None if parameter is None or "_proj." in name else tuple(parameter.shape)

    def _own_parameters(self) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if name == "draft_token_ids" or name.startswith("length_head.")
        }

    def _expected(self) -> set[str]:
        return {*expected_names(self.config), *self._own_parameters()}

    def _is_bias(self, name: str) -> bool:
        return bool(getattr(self.config, "attention_bias", False)) and name.endswith("_proj.bias")


EntryClass = AdaFlashDraftModel
