from __future__ import annotations

import pytest
import torch
from stand_ins import byte_target, byte_tokenizer
from tiny_models import tiny_drafter
from train_requests import make_request

from adaflash_hf.commands.train_lora import LoraOptions
from adaflash_hf.commands.train_start import load_start, new_start
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.initialization import attach_length_head
from adaflash_hf.training.lora import is_adapted


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafters") / "headless"
    tiny_drafter(byte_target()).to(torch.bfloat16).save_pretrained(path)
    return str(path)


def start_of(init, tmp_path, **changes):
    return load_start(make_request(tmp_path, tmp_path / "out", init=init, **changes), init)


def test_a_drafter_goes_on_in_float32_with_what_it_lacks(headless, tmp_path):
    start = start_of(headless, tmp_path, causal_blocks=True, length_head="mean_last_residual")
    assert start.drafter.dtype == torch.float32 and start.drafter.config.is_block_causal and start.decisions == []
    assert start.drafter.length_head.config.head_type == "mean_last_residual"
    assert start_of(headless, tmp_path, only="drafter").drafter.length_head is None
    assert start_of(headless, tmp_path, length_head=None).drafter.length_head is None


def test_an_adapter_is_put_on(tmp_path):
    drafter = tiny_drafter(byte_target())
    attach_length_head(drafter)
    drafter.save_pretrained(tmp_path / "drafter")
    start = start_of(str(tmp_path / "drafter"), tmp_path, lora=LoraOptions(2))
    assert is_adapted(start.drafter)
    assert [decision.name for decision in start.decisions] == ["lora_rank", "lora_alpha", "lora_target_modules"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": {"layers": 3}}, "`layers` was given"),
        ({"only": "length-head", "length_head": None}, "`--length-head` is 'none'"),
        ({"lora": LoraOptions(2)}, "has no length head"),
        ({"lora": LoraOptions(2, None, ("nothing",)), "length_head": None}, "names a linear layer"),
    ],
)
def test_what_a_drafter_cannot_become_is_refused(headless, tmp_path, changes, message):
    with pytest.raises(InvalidInputError, match=message):
        start_of(headless, tmp_path, **changes)


def test_a_new_drafter_has_the_given_shape(tmp_path):
    told = []
    request = make_request(tmp_path, tmp_path, shape={"layers": 2, "block_size": 6}, causal_blocks=True)
    start = new_start(request, byte_target(), byte_tokenizer(), told.append)
    config = start.drafter.config
    assert (config.num_hidden_layers, config.block_size, config.is_block_causal) == (2, 6, True)
    reasons = {decision.name: decision.reason for decision in start.decisions}
    assert reasons["layers"] == "given" and reasons["mask_token_id"] == "the target never says it"
    assert told[0].startswith("New drafter: 0.0M parameters")
