from __future__ import annotations

import json
import shlex

from tiny_models import tiny_drafter_config

from adaflash_hf.serving.launch_commands import launch_command, sglang_command, vllm_command


def test_sglang_counts_rows() -> None:
    command = sglang_command(tiny_drafter_config(block_size=16), "org/target", "out dir", with_plugin=False)
    assert str(command) == (
        "sglang serve --model-path org/target --speculative-algorithm DFLASH --speculative-draft-model-path 'out dir' "
        "--speculative-num-draft-tokens 16 --dtype bfloat16"
    )
    assert any("48 requests" in note for note in command.notes)
    assert "ADAFLASH" in sglang_command(tiny_drafter_config(), "t", "d", with_plugin=True).arguments


def test_vllm_counts_drafts() -> None:
    command = vllm_command(tiny_drafter_config(block_size=16), "org/target", "out")
    speculation = json.loads(shlex.split(str(command))[-1])
    assert speculation == {"method": "dflash", "model": "out", "num_speculative_tokens": 15}
    assert command.environment == {}


def test_mixed_layers_need_the_new_runner() -> None:
    config = tiny_drafter_config(layer_types=["sliding_attention", "full_attention"], sliding_window=4)
    assert str(vllm_command(config, "t", "d")).startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve t")


def test_by_format() -> None:
    config = tiny_drafter_config()
    assert launch_command("z-lab", config, "t", "d") is None
    assert str(launch_command("sglang-plugin", config, "t", "d")).startswith("sglang serve")  # there is no head
    with_head = launch_command("sglang-plugin", tiny_drafter_config(length_head_config={}), "t", "d")
    assert str(with_head).startswith("SGLANG_RAGGED_VERIFY_MODE=compact sglang serve") and "ADAFLASH" in str(with_head)
    assert with_head is not None and any("fa3" in note for note in with_head.notes)
    assert "DFLASH" in str(launch_command("sglang", config, "t", "d"))
    assert str(launch_command("speculators", config, "t", "d")) == "vllm serve d --dtype bfloat16"
