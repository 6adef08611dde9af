"""The ten traps of DFlash checkpoints, each with a checkpoint that falls into it: converted, or refused with a reason.

Read as if the trap were not there, each of these would load and have next to nothing accepted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import (
    deepspec_config,
    speculators_config,
    target_copies,
    write_deepspec,
    write_torchspec,
)
from safetensors.torch import load_file
from tiny_checkpoints import ZLAB_CONFIG, assert_same_drafter, without, write
from tiny_models import tiny_drafter, tiny_target
from transformers import AutoConfig, PreTrainedModel

from adaflash_hf import DFlashDrafterModel, DrafterCheckpointError
from adaflash_hf.errors import DrafterExportError
from adaflash_hf.serving.formats import (
    DrafterBundle,
    ReadOptions,
    TargetFiles,
    WriteOptions,
    convert_drafter,
    read_drafter,
    write_drafter,
)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target()


@pytest.fixture(scope="module")
def target_folder(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    target.save_pretrained(folder)
    return str(folder)


def drafter(**fields: Any) -> DFlashDrafterModel:
    return tiny_drafter(**{"rope_theta": 1e6, **fields})


def bundle_of(model: DFlashDrafterModel) -> DrafterBundle:
    return DrafterBundle(model.config, model.state_dict(), "memory")


def converted(source: Path, out: Path, **options: Any) -> DFlashDrafterModel:
    """The drafter that a checkpoint is after conversion to the native format."""
    convert_drafter(source, out, "native", ReadOptions(**options))
    return DFlashDrafterModel.from_pretrained(out)


def refusal(source: Path, **options: Any) -> str:
    with pytest.raises(DrafterCheckpointError) as error:
        read_drafter(source, ReadOptions(**options))
    assert str(source) in str(error.value)
    return str(error.value)


def test_a_layer_ids_one_higher_are_shifted(target_folder: str, tmp_path: Path) -> None:
    original = drafter(target_layer_ids=[0, 2])
    source = write(tmp_path / "in", speculators_config(target_folder), original.state_dict())
    assert_same_drafter(converted(source, tmp_path / "out"), original)
    assert read_drafter(source).config.target_layer_ids == [0, 2]
    with pytest.raises(DrafterCheckpointError, match="layer ids are one higher.*`adaflash convert`"):
        DFlashDrafterModel.from_pretrained(source)


def test_a_and_shifted_back_when_written(target_folder: str, tmp_path: Path) -> None:
    write_drafter(bundle_of(drafter(target_model_name_or_path=target_folder)), tmp_path / "out", "speculators")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["aux_hidden_state_layer_ids"] == [1, 3]
    write_drafter(bundle_of(drafter()), tmp_path / "zlab", "z-lab")
    written = json.loads((tmp_path / "zlab" / "config.json").read_text())
    assert written["dflash_config"]["target_layer_ids"] == [0, 2]


def test_a_the_embedding_output_has_no_id_here(target_folder: str, tmp_path: Path) -> None:
    config = speculators_config(target_folder, aux_hidden_state_layer_ids=[0, 3])
    assert "0 stands for the target's embeddings" in refusal(write(tmp_path / "a", config, drafter().state_dict()))
    source = write_deepspec(tmp_path / "b", drafter(), tiny_target(), target_layer_ids=[-1, 2])
    assert "-1 stands for the target's embeddings" in refusal(source, trust_copies=True)


def test_a_the_last_layer_is_another_thing_in_engines(tmp_path: Path) -> None:
    model = drafter(target_layer_ids=[0, 3])
    for name in ("sglang", "sglang-plugin", "vllm", "speculators"):
        with pytest.raises(DrafterExportError, match="over after the final norm"):
            write_drafter(bundle_of(model), tmp_path / name, name)


def test_b_a_count_of_features_in_the_place_of_the_depth(target: PreTrainedModel, tmp_path: Path) -> None:
    original = drafter()
    source = write_torchspec(tmp_path / "in", original, target)
    bundle = read_drafter(source, ReadOptions(block_size=4, trust_copies=True))
    assert (bundle.config.num_target_layers, bundle.config.target_layer_ids) == (4, [0, 2])
    assert any("`num_target_layers` = 2 became a target depth of 4" in note for note in bundle.notes)
    # In z-lab's format the same number contradicts the ids.
    fields = {**ZLAB_CONFIG, "num_target_layers": 2}
    assert "some writers put the number of captured layers there" in refusal(
        write(tmp_path / "zlab", fields, original.state_dict())
    )


def test_b_the_same_field_as_a_depth_with_torchspec_names(target: PreTrainedModel, tmp_path: Path) -> None:
    source = write_torchspec(
        tmp_path, drafter(), target, num_target_layers=9, target_num_hidden_layers=None, target_layer_ids=None
    )
    config = read_drafter(source, ReadOptions(block_size=4, trust_copies=True)).config
    assert (config.num_target_layers, config.target_layer_ids) == (9, [1, 6])


def test_c_fused_projections_are_taken_apart(tmp_path: Path) -> None:
    original = drafter()
    tensors = dict(original.state_dict())
    for i in range(2):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        parts = [tensors.pop(f"{attention}.{name}_proj.weight") for name in "qkv"]
        tensors[f"{attention}.qkv_proj.weight"] = torch.cat(parts)
        parts = [tensors.pop(f"{mlp}.{name}_proj.weight") for name in ("gate", "up")]
        tensors[f"{mlp}.gate_up_proj.weight"] = torch.cat(parts)
    source = write(tmp_path / "in", ZLAB_CONFIG, tensors)
    with pytest.raises(DrafterCheckpointError, match="fused projections.*`adaflash convert`"):
        DFlashDrafterModel.from_pretrained(source)
    assert_same_drafter(converted(source, tmp_path / "out"), original)


def test_c_fused_projections_of_other_sizes_are_refused(tmp_path: Path) -> None:
    tensors = dict(drafter().state_dict())
    parts = [tensors.pop(f"layers.0.self_attn.{name}_proj.weight") for name in "qkv"]
    tensors["layers.0.self_attn.qkv_proj.weight"] = torch.cat(parts)[:-1]
    message = refusal(write(tmp_path, ZLAB_CONFIG, tensors))
    assert "has 63 rows, but config.json makes 32 + 16 + 16 of q_proj, k_proj, v_proj" in message


def test_c_fused_beside_separate_is_refused(tmp_path: Path) -> None:
    tensors = dict(drafter().state_dict())
    parts = [tensors[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    tensors["layers.0.self_attn.qkv_proj.weight"] = torch.cat(parts)
    assert "are both `layers.0.self_attn." in refusal(write(tmp_path, ZLAB_CONFIG, tensors))


def test_d_a_model_prefix_is_taken_off(tmp_path: Path) -> None:
    original = drafter()
    tensors = {f"model.{name}": tensor for name, tensor in original.state_dict().items()}
    source = write(tmp_path / "in", ZLAB_CONFIG, tensors)
    assert_same_drafter(converted(source, tmp_path / "out"), original)
    convert_drafter(source, tmp_path / "vllm", "vllm")
    assert "fc.weight" in load_file(tmp_path / "vllm" / "model.safetensors"), "vLLM adds the prefix itself"


def test_e_the_block_size_is_found_nested_or_above(tmp_path: Path) -> None:
    nested = {**ZLAB_CONFIG["dflash_config"], "block_size": 6}
    source = write(tmp_path / "nested", {**ZLAB_CONFIG, "dflash_config": nested}, drafter().state_dict())
    assert read_drafter(source).config.block_size == 6, "the nested value wins, as in z-lab's code"
    convert_drafter(source, tmp_path / "out", "sglang")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["block_size"] == 6


def test_e_an_unknown_block_size_is_asked_for(target: PreTrainedModel, tmp_path: Path) -> None:
    source = write_torchspec(tmp_path / "in", drafter(), target)
    assert "does not say the `block_size`" in refusal(source, trust_copies=True)
    assert_same_drafter(converted(source, tmp_path / "out", trust_copies=True, block_size=4), drafter())


@pytest.mark.parametrize("style", ["theta", "parameters", "both"])
def test_f_both_spellings_of_rope_are_read_and_written(style: str, tmp_path: Path) -> None:
    fields = {"theta": {"rope_theta": 5e5}, "parameters": {"rope_parameters": {"rope_theta": 5e5}}}
    chosen = {**fields["theta"], **fields["parameters"]} if style == "both" else fields[style]
    source = write(tmp_path / "in", {**without(ZLAB_CONFIG, "rope_theta"), **chosen}, drafter().state_dict())
    convert_drafter(source, tmp_path / "out", "vllm")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e5


def test_f_contradicting_ropes_are_refused(tmp_path: Path) -> None:
    fields = {**ZLAB_CONFIG, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    assert "`rope_theta` is 1000000 but" in refusal(write(tmp_path, fields, drafter().state_dict()))


def test_f_interleaved_rope_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, {**ZLAB_CONFIG, "is_neox_style": False}, drafter().state_dict())
    assert "interleaved RoPE" in refusal(source)


def test_f_scaled_rope_reaches_both_generations_of_readers(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
    write_drafter(bundle_of(drafter(rope_parameters=rope)), tmp_path / "out", "sglang")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_scaling"]["rope_type"] == "yarn" and written["rope_scaling"]["factor"] == 4.0
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters["factor"] == 4.0


@pytest.mark.parametrize(("declared", "causal"), [(None, [True, False]), (False, [False, False]), (True, [True] * 2)])
def test_g_undeclared_sliding_layers_are_causal(declared: bool | None, causal: list[bool], tmp_path: Path) -> None:
    fields = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    source = write(tmp_path / "in", {**ZLAB_CONFIG, **fields, "is_causal": declared}, drafter().state_dict())
    for name in ("native", "z-lab", "vllm"):
        convert_drafter(source, tmp_path / name, name)
        config = read_drafter(tmp_path / name).config
        assert [config.is_causal_layer(i) for i in range(2)] == causal
        assert config.sliding_window == 5


def test_g_the_window_survives_qwen3config(tmp_path: Path) -> None:
    write_drafter(
        bundle_of(drafter(layer_types=["sliding_attention"] * 2, sliding_window=5)), tmp_path / "out", "sglang"
    )
    assert AutoConfig.from_pretrained(tmp_path / "out").sliding_window == 5


@pytest.mark.parametrize("non_causal", [False, True])
def test_g_speculators_flag_is_about_sliding_layers_only(non_causal: bool, target_folder: str, tmp_path: Path) -> None:
    config = speculators_config(target_folder, sliding_window_non_causal=non_causal)
    config["transformer_layer_config"] |= {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "use_sliding_window": True,
    }
    read = read_drafter(write(tmp_path / "mixed", config, drafter().state_dict())).config
    assert [read.is_causal_layer(i) for i in range(2)] == [not non_causal, False]
    config = speculators_config(target_folder, sliding_window_non_causal=non_causal)
    read = read_drafter(write(tmp_path / "full", config, drafter().state_dict())).config
    assert [read.is_causal_layer(i) for i in range(2)] == [False, False]


def test_g_full_layers_stay_bidirectional_in_vllm_0_32(target_folder: str, tmp_path: Path) -> None:
    write_drafter(bundle_of(drafter(target_model_name_or_path=target_folder)), tmp_path / "out", "speculators")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    # False, speculators' default, is what vLLM turns into `causal` for every layer.
    assert written["sliding_window_non_causal"] is True


def test_h_undeclared_anchor_first_is_recognised_by_its_class(target_folder: str, tmp_path: Path) -> None:
    original = drafter(block_layout="anchor_first")
    source = write_deepspec(tmp_path / "in", original, tiny_target())
    options = ReadOptions(target=TargetFiles(target_folder))
    _, written = convert_drafter(source, tmp_path / "out", "native", options)
    assert written.holds.config.block_layout == "anchor_first"
    assert_same_drafter(DFlashDrafterModel.from_pretrained(tmp_path / "out"), original)
    assert "anchor-first" in str(
        pytest.raises(DrafterCheckpointError, DFlashDrafterModel.from_pretrained, source).value
    )


def test_h_the_user_may_declare_it(tmp_path: Path) -> None:
    source = write(tmp_path / "in", {**ZLAB_CONFIG, "block_size": 7}, drafter().state_dict())
    bundle = read_drafter(source)
    assert bundle.config.block_layout == "anchor_then_masks"
    assert any("A block of 7 is DeepSpec's" in note for note in bundle.notes)
    assert read_drafter(source, ReadOptions(block_layout="anchor_first")).config.block_layout == "anchor_first"


@pytest.mark.parametrize("name", ["z-lab", "sglang", "sglang-plugin", "vllm"])
def test_h_readers_that_assume_the_other_layout_get_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(DrafterExportError, match="`block_layout` is 'anchor_first'.*next to nothing would"):
        write_drafter(bundle_of(drafter(block_layout="anchor_first")), tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


def test_h_speculators_declares_the_layout(target_folder: str, tmp_path: Path) -> None:
    model = drafter(block_layout="anchor_first", target_model_name_or_path=target_folder)
    write_drafter(bundle_of(model), tmp_path / "out", "speculators")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["sample_from_anchor"] is True
    assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


def test_i_a_missing_or_unknown_tensor_is_never_written(tmp_path: Path) -> None:
    model = drafter()
    for tensors, reason in (
        (without(model.state_dict(), "hidden_norm.weight"), "1 tensors are missing: `hidden_norm.weight`"),
        ({**model.state_dict(), "fc_.weight": torch.zeros(2)}, "1 tensors have no place in the drafter: `fc_.weight`"),
        ({**model.state_dict(), "fc.weight": torch.zeros(32, 96)}, "has shape [32, 96], but config.json asks"),
    ):
        with pytest.raises(DrafterCheckpointError) as error:
            write_drafter(DrafterBundle(model.config, tensors, "memory"), tmp_path / "out", "sglang")
        assert reason in str(error.value)
        assert not (tmp_path / "out").exists()


def test_i_the_written_names_are_exactly_those_sglang_loads(tmp_path: Path) -> None:
    write_drafter(bundle_of(drafter(length_head_config={"bottleneck_size": 4})), tmp_path / "out", "sglang")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    attention = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts = [
        *attention,
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ]
    assert names == {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
        f"layers.{i}.{part}.weight" for i in range(2) for part in parts
    }
    assert len(names) == 3 + 11 * 2


def test_j_a_reduced_head_is_kept_as_token_ids(target: PreTrainedModel, target_folder: str, tmp_path: Path) -> None:
    ids = torch.tensor([1, 4, 5, 90])
    tensors = {
        **drafter().state_dict(),
        "lm_head.weight": target.get_output_embeddings().weight.detach()[ids],
        "d2t": ids - torch.arange(4),
        "t2d": torch.zeros(96, dtype=torch.bool).index_fill(0, ids, True),
    }
    source = write(tmp_path / "in", speculators_config(target_folder, draft_vocab_size=4), tensors)
    model = converted(source, tmp_path / "out")
    assert model.config.draft_vocab_size == 4
    assert model.draft_token_ids.tolist() == [1, 4, 5, 90]
    # And back, with the same rows and offsets.
    convert_drafter(tmp_path / "out", tmp_path / "back", "speculators")
    back = load_file(tmp_path / "back" / "model.safetensors")
    for name in ("lm_head.weight", "d2t", "t2d"):
        assert torch.equal(back[name], tensors[name]), name


def test_j_a_trained_reduced_head_is_refused(target: PreTrainedModel, target_folder: str, tmp_path: Path) -> None:
    ids = torch.tensor([1, 4, 5, 90])
    rows = target.get_output_embeddings().weight.detach()[ids]
    rows[2] += 1
    tensors = {**drafter().state_dict(), "lm_head.weight": rows, "d2t": ids - torch.arange(4)}
    source = write(tmp_path, speculators_config(target_folder, draft_vocab_size=4), tensors)
    assert f"`lm_head.weight` differs from that of {target_folder} in 1 of 4 rows" in refusal(source)


def test_j_token_ids_in_the_place_of_offsets_are_refused(target_folder: str, tmp_path: Path) -> None:
    tensors = {**drafter().state_dict(), "lm_head.weight": torch.zeros(4, 32), "d2t": torch.tensor([1, 50, 93, 95])}
    source = write(tmp_path, speculators_config(target_folder, draft_vocab_size=4), tensors)
    assert "holds token ids in their place" in refusal(source)


def test_j_an_own_head_is_compared_with_the_targets(
    target: PreTrainedModel, target_folder: str, tmp_path: Path
) -> None:
    source = write_deepspec(tmp_path / "copies", drafter(), target)
    assert "Only copies of the target's can be left out: pass --target" in refusal(source)
    read_drafter(source, ReadOptions(target=TargetFiles(target_folder)))
    copies = target_copies(target)
    copies["lm_head.weight"][7] += 1
    source = write(tmp_path / "trained", deepspec_config(), {**drafter().state_dict(), **copies})
    assert "differs from that of" in refusal(source, target=TargetFiles(target_folder))


def test_vllm_takes_a_draft_vocabulary_as_rows_of_the_head(
    target: PreTrainedModel, target_folder: str, tmp_path: Path
) -> None:
    model = drafter(draft_vocab_size=3)
    model.set_draft_vocabulary(torch.tensor([0, 7, 95]))
    with pytest.raises(DrafterExportError, match="draft vocabulary of 3 tokens.*Pass --target"):
        write_drafter(bundle_of(model), tmp_path / "no", "vllm")
    write_drafter(bundle_of(model), tmp_path / "out", "vllm", WriteOptions(target=TargetFiles(target_folder)))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["d2t"].tolist() == [0, 6, 93]
    head = target.get_output_embeddings().weight.detach()
    assert torch.equal(tensors["lm_head.weight"], head[[0, 7, 95]].to(torch.bfloat16))


def test_an_embedding_for_the_mask_rows_is_not_overlooked(tmp_path: Path) -> None:
    """MiMo's drafters bring one in a file beside the weights, which no reader of tensors would notice."""
    source = write(tmp_path, ZLAB_CONFIG, drafter().state_dict())
    (source / "mask_embedding.pt").write_bytes(b"never opened")
    assert "`mask_embedding.pt`: an embedding for the mask rows" in refusal(source)
    with pytest.raises(DrafterCheckpointError, match="mask_embedding.pt"):
        DFlashDrafterModel.from_pretrained(source)
