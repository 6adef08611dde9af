"""The drafter that a run of `adaflash train` begins with: one that is there, perhaps with an adapter, or a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InvalidInputError


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_dflash_drafter import DFlashDrafterModel
    from ..training.recipes import Decision
    from .train_request import TrainRequest


__all__ = ["TrainStart", "load_start", "new_start"]


class TrainStart(NamedTuple):
    """A drafter to train, and what was decided of its shape or its adapter."""

    drafter: DFlashDrafterModel | PeftModel
    decisions: list[Decision]


def load_start(request: TrainRequest, init: str) -> TrainStart:
    """
    The drafter of `--init`. New parts, which are an adapter or a length head, have random weights.

    Args:
        request (`TrainRequest`):
            Of the run.
        init (`str`):
            Hub id or directory.
    """
    import torch

    from ..hub_connection import loading_checkpoint
    from ..modeling_dflash_drafter import DFlashDrafterModel
    from ..training.initialization import attach_length_head

    if request.shape:
        raise InvalidInputError(
            f"`--init` is {init!r}, whose sizes are settled, but `{next(iter(request.shape))}` was given; leave it "
            "out, or train --from-scratch."
        )
    changed = {} if request.causal_blocks is None else {"is_causal": request.causal_blocks}
    # Weights are trained in float32, whatever they were saved in.
    with loading_checkpoint(init, "--init"):
        drafter = DFlashDrafterModel.from_pretrained(init, dtype=torch.float32, **changed)
    if drafter.length_head is None and request.only in (None, "length-head"):
        if request.length_head is not None:
            if request.lora is not None:
                request.lora.refuse_new_length_head(init)
            attach_length_head(drafter, request.length_head)
        elif request.only is not None:
            raise InvalidInputError(
                f"`--only` is 'length-head', but the drafter {init!r} has none, and `--length-head` is 'none'; give "
                "it the shape of a new one."
            )
    if request.lora is not None:
        return TrainStart(request.lora.put_on(drafter, init), request.lora.decisions())
    return TrainStart(drafter, [])


def new_start(
    request: TrainRequest,
    target_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    say: Callable[[str], None],
) -> TrainStart:
    """
    A new drafter, which begins as the end of its target.

    Args:
        request (`TrainRequest`):
            Of the run.
        target_model (`PreTrainedModel`):
            The target.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer.
        say (`Callable[[str], None]`):
            Tells the user.
    """
    from ..modeling_dflash_drafter import DFlashDrafterModel
    from ..training import initialization
    from ..training.recipes import CONFIG_FIELDS, ShapeDefaults, decide_shape

    defaults = ShapeDefaults(
        on_cpu=target_model.device.type == "cpu",
        num_target_layers=target_model.config.get_text_config().num_hidden_layers,
        target_layer_ids=initialization.default_target_layer_ids(target_model),
        choose_mask_token_id=lambda: initialization.choose_mask_token_id(target_model, tokenizer),
    )
    decisions = decide_shape(defaults, request.shape, request.preset)
    decided = {CONFIG_FIELDS.get(name, name): value for name, value, _ in decisions}
    fields = {**(request.preset.fields if request.preset is not None else {}), **decided}
    if request.causal_blocks is not None:
        fields["is_causal"] = request.causal_blocks
    config = initialization.drafter_config_for_target(target_model, length_head=request.length_head, **fields)
    drafter = DFlashDrafterModel(config)
    copied = initialization.initialize_from_target(drafter, target_model)
    total = len(list(drafter.parameters()))
    say(
        f"New drafter: {drafter.num_parameters() / 1e6:.1f}M parameters; {len(copied)} of {total} tensors start as "
        "copies of the target's."
    )
    return TrainStart(drafter, decisions)
