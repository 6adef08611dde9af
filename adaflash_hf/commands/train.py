"""`adaflash train`: a drafter, its length head, both, or a confidence head, on stored trajectories."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer

from ..errors import InvalidInputError
from . import train_options as options
from .config_files import given_by_config_file
from .options import DeviceOption, Dtype, DtypeOption, TargetOption, is_default
from .trajectories import parse_layer_ids


if TYPE_CHECKING:
    from ..training.presets import DrafterPreset


__all__ = ["train"]


def train(
    context: typer.Context,
    trajectories: options.TrajectoriesOption,
    out: options.OutOption,
    target: TargetOption = "smollm2-135m",
    config: options.ConfigOption = None,
    init: options.InitOption = None,
    from_scratch: options.FromScratchOption = False,
    preset: options.PresetOption = None,
    list_presets: options.ListPresetsOption = False,
    only: options.OnlyOption = None,
    lora_rank: options.LoraRankOption = None,
    lora_alpha: options.LoraAlphaOption = None,
    lora_target_modules: options.LoraTargetModulesOption = None,
    layers: options.LayersOption = None,
    block_size: options.BlockSizeOption = None,
    causal_blocks: options.CausalBlocksOption = None,
    target_layer_ids: options.LayerIdsOption = None,
    mask_token_id: options.MaskTokenOption = None,
    length_head: options.LengthHeadOption = options.LengthHead.MEAN_LINEAR,
    length_labels: options.LengthLabelsOption = None,
    objective: options.ObjectiveOption = None,
    hard_label_weight: options.HardLabelWeightOption = None,
    divergence: options.DivergenceOption = None,
    clip: options.ClipOption = None,
    clip_threshold: options.ClipThresholdOption = None,
    position_decay: options.PositionDecayOption = None,
    teacher: options.TeacherOption = options.Teacher.AUTO,
    vocabulary_size: options.VocabularySizeOption = None,
    draft_vocabulary: options.DraftVocabularyOption = None,
    anchors: options.AnchorsOption = None,
    batch_size: options.BatchSizeOption = None,
    gradient_accumulation: options.AccumulationOption = None,
    epochs: options.EpochsOption = None,
    steps: options.StepsOption = None,
    optimizer: options.OptimizerOption = None,
    learning_rate: options.LearningRateOption = None,
    vector_learning_rate: options.VectorLearningRateOption = None,
    warmup_steps: options.WarmupOption = None,
    decay_fraction: options.DecayFractionOption = None,
    held_out: options.HeldOutOption = 64,
    max_tokens: options.MaxTokensOption = 2048,
    features: options.FeaturesOption = options.Features.AUTO,
    seed: options.SeedOption = 0,
    resume: options.ResumeOption = True,
    report_to: options.ReportToOption = None,
    push_to_hub: options.PushToHubOption = None,
    private: options.PrivateOption = False,
    license: options.LicenseOption = None,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
) -> None:
    """
    Train a drafter on what its target said, from scratch or from an existing one, or only a head on it.

    Where no default is shown, it depends on what is trained and where; a run prints each with its reason.
    """
    from .train_lora import lora_options
    from .train_request import TrainRequest
    from .train_run import TrainRun

    del config, list_presets  # their callbacks have done it
    start = _start(init, from_scratch, only)
    chosen_preset = _preset(preset, init)
    if chosen_preset is not None and is_default(context, "target"):
        target = chosen_preset.target
    rate = "learning_rate" if start in ("scratch", "init") else "length_head_learning_rate"
    given = {
        "length_labels": length_labels,
        "objective": objective,
        "hard_label_weight": hard_label_weight,
        "divergence": divergence,
        "clip": clip,
        "clip_threshold": clip_threshold,
        "position_decay": position_decay,
        "vocabulary_size": vocabulary_size,
        "draft_vocabulary": draft_vocabulary,
        "optimizer": optimizer,
        rate: learning_rate,
        "vector_learning_rate": vector_learning_rate,
        "batch_size": batch_size,
        "gradient_accumulation": gradient_accumulation,
        "anchors": anchors,
        "epochs": epochs,
        "warmup_steps": warmup_steps,
        "decay_fraction": decay_fraction,
    }
    if start == "scratch" and not from_scratch and os.environ.get("RANK", "0") == "0":
        typer.echo(
            "A new drafter will be trained: neither --init nor --from-scratch was given. --init goes on with an "
            "existing one; --from-scratch says that a new one is meant."
        )
    shape = {
        "layers": layers,
        "block_size": block_size,
        "target_layer_ids": parse_layer_ids(target_layer_ids),
        "mask_token_id": mask_token_id,
    }
    request = TrainRequest(
        start=start,
        target=target,
        dtype=dtype.value,
        device=device,
        trajectories=trajectories,
        out=out,
        init=init,
        preset=chosen_preset,
        only=None if only is None else only.value,
        lora=lora_options(lora_rank, lora_alpha, lora_target_modules, start=start, given=given),
        shape={name: value for name, value in shape.items() if value is not None},
        causal_blocks=causal_blocks,
        length_head=None if length_head is options.LengthHead.NONE else length_head.value,
        given={name: getattr(value, "value", value) for name, value in given.items() if value is not None},
        droppable=[name for name in given if given_by_config_file(context, name)],
        teacher=teacher.value,
        features=features.value,
        steps=steps,
        held_out=held_out,
        max_tokens=max_tokens,
        seed=seed,
        resume=resume,
        report_to=report_to or [],
        push_to_hub=push_to_hub,
        private=private,
        license=license,
        options={**context.params, "target": target},
    )
    TrainRun(request).execute()


def _start(init: str | None, from_scratch: bool, only: options.Only | None) -> Any:
    if init is not None and from_scratch:
        raise InvalidInputError(f"`--init` is {init!r} and `--from-scratch` was given; choose one of them.")
    if only in (options.Only.LENGTH_HEAD, options.Only.CONFIDENCE_HEAD):
        if init is None:
            raise InvalidInputError(f"`--only` is {only.value!r}, which needs a trained drafter; pass it with --init.")
        return only.value.replace("-", "_")
    return "scratch" if init is None else "init"


def _preset(name: str | None, init: str | None) -> DrafterPreset | None:
    from ..training.presets import find_preset

    if name is None:
        return None
    if init is not None:
        raise InvalidInputError(
            f"`--init` is {init!r}, whose sizes are settled, but `--preset` {name!r} was given; leave one of them out."
        )
    return find_preset(name)
