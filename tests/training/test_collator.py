from __future__ import annotations

import torch

from adaflash_hf.training.collator import DrafterDataCollator
from adaflash_hf.training.objectives import IGNORED_LABEL as NONE


def example(index, prompt_length, length, **fields):
    return {
        "index": index,
        "input_ids": torch.arange(100, 100 + length) + 100 * index,
        "prompt_length": prompt_length,
        "finished": index == 1,
        "domain_id": index,
        **fields,
    }


def test_batch_by_hand():
    batch = DrafterDataCollator(draft_length=2, anchors_per_trajectory=None)([example(0, 2, 5), example(1, 1, 3)])
    assert batch["input_ids"].tolist() == [[100, 101, 102, 103, 104], [200, 201, 202, 0, 0]]
    # Anchors are response tokens with a token after them.
    assert batch["anchors"].tolist() == [[2, 3], [1, 0]]
    assert batch["labels"].tolist() == [[[103, 104], [104, NONE]], [[202, NONE], [NONE, NONE]]]
    assert batch["finished"].tolist() == [False, True] and batch["domain_ids"].tolist() == [0, 1]
    assert set(batch) == {"input_ids", "anchors", "labels", "finished", "domain_ids"}


def test_teacher_and_features_belong_to_their_positions():
    def stored(response, rows):
        return {
            "teacher_ids": torch.arange(response)[:, None].expand(-1, 2).int(),
            "teacher_log_probs": -torch.arange(response)[:, None].expand(-1, 2).half(),
            "context_hidden_states": torch.arange(rows)[:, None].float(),
        }

    examples = [example(0, 2, 5, **stored(3, 4)), example(1, 1, 3, **stored(2, 2))]
    batch = DrafterDataCollator(draft_length=2, anchors_per_trajectory=None)(examples)
    # Position 3 is response token 1, and so on; beyond the end stands something that is ignored.
    assert batch["teacher_ids"][0, :, :, 0].tolist() == [[1, 2], [2, 2]]
    assert batch["teacher_log_probs"][0, :, :, 1].tolist() == [[-1, -2], [-2, -2]]
    assert batch["teacher_ids"].shape == (2, 2, 2, 2) and batch["teacher_ids"].dtype == torch.long
    assert batch["context_hidden_states"][..., 0].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]


def test_anchors_change_with_the_epoch_and_not_with_the_company():
    collator = DrafterDataCollator(draft_length=2, anchors_per_trajectory=5, seed=1)
    alone = collator([example(0, 3, 60)])["anchors"]
    together = collator([example(1, 3, 60), example(0, 3, 60)])["anchors"]
    assert torch.equal(alone[0], together[1]) and not torch.equal(together[0], together[1])
    collator.epoch = 1
    assert not torch.equal(collator([example(0, 3, 60)])["anchors"], alone)
    collator.epoch = 0
    assert torch.equal(collator([example(0, 3, 60)])["anchors"], alone)
