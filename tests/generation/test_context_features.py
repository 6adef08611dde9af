"""The right layers reach the drafter, whatever an index means to the installed transformers."""

from __future__ import annotations

import pytest
import torch
from plain_comparison import prompt, shared_target

from adaflash_hf.generation.context_features import concatenate_context_features, hidden_states_to_request


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
