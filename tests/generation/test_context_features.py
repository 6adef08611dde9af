"""The right layers reach the drafter, whatever an index means to the installed transformers."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from plain_comparison import exact_target, prompt, shared_target

from adaflash_hf.errors import UnsupportedGenerationError
from adaflash_hf.generation.context_features import (
    concatenate_context_features,
    forward_with_features,
    hidden_states_to_request,
)


@pytest.mark.parametrize("layer_ids", [[0], [1, 3], [3, 0], [0, 1, 2, 3]])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_outputs_of_the_layers_asked_for(architecture: str, layer_ids: list[int]) -> None:
    target = shared_target(architecture)
    outputs: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda module, args, output, i=i: outputs.update({i: output[0] if isinstance(output, tuple) else output})
        )
        for i, layer in enumerate(target.model.layers)
    ]
    with torch.no_grad():
        states = target(prompt(), output_hidden_states=hidden_states_to_request(layer_ids)).hidden_states
        everything = target(prompt(), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    outputs[3] = everything[-1]  # transformers' last hidden state is the one after the final norm
    expected = torch.cat([outputs[i] for i in layer_ids], dim=-1)
    for given in (states, everything):
        features = concatenate_context_features(given, layer_ids, num_layers=4)
        torch.testing.assert_close(features, expected, rtol=0, atol=1e-6)
    assert sum(state is not None for state in states) == len(layer_ids)


def test_rows_are_cut() -> None:
    states = [torch.arange(6.0).reshape(1, 3, 2) + 10 * i for i in range(3)]
    features = concatenate_context_features(states, [1, 0], num_layers=2, rows=2)
    assert features.tolist() == [[[20, 21, 10, 11], [22, 23, 12, 13]]]


def recorded(model, layer_ids):
    with torch.no_grad():
        output = forward_with_features(model, layer_ids, input_ids=prompt())
        return concatenate_context_features(output.hidden_states, layer_ids, num_layers=4)


def expected_of(model, layer_ids):
    with torch.no_grad():
        states = model(prompt(), output_hidden_states=hidden_states_to_request(layer_ids)).hidden_states
    return concatenate_context_features(states, layer_ids, num_layers=4)


def has_hooks(layer):
    return bool(layer._forward_hooks)


@pytest.mark.parametrize("layer_ids", [[0], [2, 0], [1, 3]])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_a_forward_pass_keeps_what_transformers_would_record(architecture: str, layer_ids: list[int]) -> None:
    target = exact_target(architecture)
    features = recorded(target, layer_ids)
    if 3 not in layer_ids:  # the last layer's output is not what transformers calls its hidden state
        assert [i for i, layer in enumerate(target.model.layers) if has_hooks(layer)] == sorted(layer_ids)
    assert torch.equal(features, expected_of(target, layer_ids))
    assert torch.equal(recorded(target, layer_ids), features)


def test_without_layers_nothing_is_kept() -> None:
    output = forward_with_features(exact_target("llama"), (), input_ids=prompt())
    assert output.hidden_states is None


def test_a_target_without_a_list_of_what_can_be_recorded_is_asked_itself() -> None:
    target = exact_target("llama")
    expected = expected_of(target, [1])
    target.model._can_record_outputs = None
    assert torch.equal(recorded(target, [1]), expected)


@pytest.mark.parametrize("compile_part", ["model", "forward", "layer"])
def test_no_hook_breaks_a_compiled_graph(compile_part: str) -> None:
    model = target = exact_target("llama")
    expected = expected_of(target, [1])
    if compile_part == "model":
        model = torch.compile(target, backend="eager")
    elif compile_part == "forward":
        target.forward = torch.compile(target.forward, backend="eager")
    else:
        target.model.layers[0].compile(backend="eager")
    before = [len(layer._forward_hooks) for layer in target.model.layers]
    assert torch.equal(recorded(model, [1]), expected)
    assert [len(layer._forward_hooks) for layer in target.model.layers] == before


def test_threads_do_not_see_each_others_layers() -> None:
    target = exact_target("llama")
    expected = {i: expected_of(target, [i]) for i in range(3)}
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda number: (number % 3, recorded(target, [number % 3])), range(60)))
    assert all(torch.equal(features, expected[layer]) for layer, features in found)


def test_a_copy_records_its_own() -> None:
    target = exact_target("llama")
    recorded(target, [1])
    other = copy.deepcopy(target)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.add_(1.0)
    assert torch.equal(recorded(other, [1]), expected_of(other, [1]))
    assert not torch.equal(recorded(other, [1]), recorded(target, [1]))


def test_a_target_of_several_residual_streams_is_refused() -> None:
    streams = [None, torch.zeros(1, 9, 4, 32)]
    with pytest.raises(UnsupportedGenerationError, match=r"shape \(1, 9, 4, 32\); a drafter reads one vector"):
        concatenate_context_features(streams, [1], 2)
