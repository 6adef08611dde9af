from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_drafter, tiny_target
from tiny_trajectories import make_trajectories

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.collator import DrafterDataCollator
from adaflash_hf.training.draft_step import DraftStep
from adaflash_hf.training.initialization import attach_length_head
from adaflash_hf.training.objectives import IGNORED_LABEL, DraftObjective
from adaflash_hf.training.trajectory_dataset import TrajectoryDataset
from adaflash_hf.training.vocabulary import RestrictedVocabulary, build_restricted_vocabulary, count_tokens


MIXTURE = DraftObjective(0.5, "forward_kl", "none")
CROSS_ENTROPY = DraftObjective(1.0, labels="trajectory")
ACCEPTANCE = DraftObjective(0.0, "acceptance", "none", labels="trajectory")
LAYER_IDS = [0, 2]


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def directory(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("trajectories")
    # All 96 tokens as "top k", so that the stored teacher is the full distribution.
    return make_trajectories(path, target, count=4, teacher_top_k=96, capture_layer_ids=tuple(LAYER_IDS))


def batch_of(directory, drafter, features=True):
    dataset = TrajectoryDataset(directory, feature_layer_ids=LAYER_IDS if features else None)
    return DrafterDataCollator(drafter.config.draft_length, None)([dataset[i] for i in range(len(dataset))])


def naive_outcome(drafter, target, batch, objective):
    """One block at a time, all logits at once, the target run over each text: the same by the definitions."""
    losses, accepted = [], []
    decay, config = 2.0, drafter.config
    for row, anchors in enumerate(batch["anchors"]):
        ids = batch["input_ids"][row]
        output = target(ids[None], output_hidden_states=True)
        context = torch.cat([output.hidden_states[i + 1] for i in LAYER_IDS], dim=-1)
        for place, anchor in enumerate(anchors.tolist()):
            labels = batch["labels"][row, place]
            if labels[0] == IGNORED_LABEL:
                continue
            block = torch.full((1, config.block_size), config.mask_token_id)
            block[0, 0] = ids[anchor]
            noise = target.get_input_embeddings()(block)
            hidden = drafter(noise_embeds=noise, context_hidden_states=context[:, :anchor]).last_hidden_state[0]
            log_q = drafter.compute_logits(hidden[-config.draft_length :], target.lm_head).log_softmax(-1)
            count, running, reached = 0, True, 1.0
            for slot, label in enumerate(labels.tolist()):
                if label == IGNORED_LABEL:
                    break
                log_p = output.logits[0, anchor + slot].log_softmax(-1)
                hard = -log_q[slot, label if objective is not MIXTURE else int(log_p.argmax())]
                reached = reached * log_q[slot, label].exp()
                soft = (log_p.exp() * (log_p - log_q[slot])).sum() if objective is MIXTURE else 1 - reached
                weight = objective.hard_label_weight
                losses.append((2.718281828 ** (-slot / decay), weight * hard + (1 - weight) * soft))
                running = running and int(log_q[slot].argmax()) == label
                count += running
            accepted.append(count)
    total = sum(weight for weight, _ in losses)
    return sum(weight * loss for weight, loss in losses) / total, accepted


@pytest.mark.parametrize("layout", ["anchor_then_masks", "anchor_first"])
@pytest.mark.parametrize(
    ("objective", "teacher"),
    [(CROSS_ENTROPY, "none"), (ACCEPTANCE, "none"), (MIXTURE, "full"), (MIXTURE, "top_k")],
)
def test_loss_gradient_and_acceptance_equal_the_definitions(target, directory, layout, objective, teacher):
    drafter = tiny_drafter(target, block_layout=layout)
    batch = batch_of(directory, drafter, features=teacher != "full")
    step = DraftStep(drafter, target, objective, position_decay=2.0, teacher=teacher, logits_memory_bytes=96 * 24 * 7)
    outcome = step.run(drafter, batch)
    outcome.draft.loss.backward()
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    expected, accepted = naive_outcome(drafter, target, batch, objective)
    expected.backward()
    # A stored teacher is rounded to float16, and what is left of its probability counts as 1e-6.
    tolerance = 3e-3 if teacher == "top_k" else 1e-5
    torch.testing.assert_close(outcome.draft.loss, expected, atol=tolerance, rtol=tolerance)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=tolerance, rtol=tolerance)
    assert outcome.acceptance.accepted[outcome.valid].tolist() == accepted
    assert outcome.head is None
    judged = step.judge(drafter, batch)
    assert torch.equal(judged.valid, outcome.valid) and torch.equal(judged.hidden_states, outcome.hidden_states)
    for judged_part, part in zip(judged.acceptance, outcome.acceptance, strict=True):
        assert torch.equal(judged_part[judged.valid], part[outcome.valid])


def test_features_on_the_fly_equal_stored_ones(target, directory):
    drafter = tiny_drafter(target)
    step = DraftStep(drafter, target, CROSS_ENTROPY)
    losses = [step.run(drafter, batch_of(directory, drafter, features)).draft.loss for features in (True, False)]
    torch.testing.assert_close(*losses)


def test_a_restricted_vocabulary_of_all_that_occurs_costs_only_the_rest_of_the_softmax(target, directory):
    drafter = tiny_drafter(target)
    dataset = TrajectoryDataset(directory)
    counts = count_tokens(dataset, range(len(dataset)), 96)
    everything = DraftStep(
        drafter, target, MIXTURE, teacher="top_k", vocabulary=build_restricted_vocabulary(counts, 96)
    )
    plain = DraftStep(drafter, target, MIXTURE, teacher="top_k")
    batch = batch_of(directory, drafter)
    torch.testing.assert_close(everything.run(drafter, batch).draft.loss, plain.run(drafter, batch).draft.loss)
    vocabulary = build_restricted_vocabulary(counts, 10)
    small = DraftStep(drafter, target, MIXTURE, teacher="top_k", vocabulary=vocabulary)
    outcome = small.run(drafter, batch)
    assert outcome.draft.loss.isfinite() and 0 < outcome.weight < plain.run(drafter, batch).weight
    assert outcome.draft.predicted_ids.max() < 10  # places in the vocabulary
    # Evaluation drafts from all tokens, as decoding does.
    full = small.run(drafter, batch, as_decoding=True)
    assert torch.equal(full.acceptance.accepted, plain.run(drafter, batch).acceptance.accepted)


def test_a_draft_vocabulary_limits_training_and_evaluation(target, directory):
    drafter, batch = tiny_drafter(target), batch_of(directory, tiny_drafter(target))
    vocabulary = RestrictedVocabulary(torch.arange(0, 96, 4), 96)
    given = DraftStep(drafter, target, CROSS_ENTROPY, vocabulary=vocabulary).run(drafter, batch)
    drafter.set_draft_vocabulary(vocabulary.token_ids)
    step = DraftStep(drafter, target, CROSS_ENTROPY)
    for as_decoding in (True, False):
        own = step.run(drafter, batch, as_decoding=as_decoding)
        torch.testing.assert_close(own.draft.loss, given.draft.loss)
        assert torch.equal(own.acceptance.accepted, given.acceptance.accepted)
    assert torch.equal(step.judge(drafter, batch).acceptance.accepted, given.acceptance.accepted)


def test_length_head_learns_the_hindsight_label_and_leaves_the_drafter_alone(target, directory):
    drafter = tiny_drafter(target)
    attach_length_head(drafter)
    batch = batch_of(directory, drafter)
    outcome = DraftStep(drafter, target, CROSS_ENTROPY).run(drafter, batch)
    known = outcome.acceptance.is_known & outcome.valid
    assert torch.equal(outcome.head.labels, (outcome.acceptance.accepted[known] + 1) / 4)
    outcome.head.loss.backward()
    with_gradient = {name for name, parameter in drafter.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in drafter.named_parameters() if name.startswith("length_head.")}


def test_truncated_labels_are_only_what_the_head_learns(target, directory):
    drafter = tiny_drafter(target)
    head = attach_length_head(drafter)
    batch = batch_of(directory, drafter)
    plain = DraftStep(drafter, target, CROSS_ENTROPY)
    # As if the target had said whatever is drafted, so that all of every block is accepted.
    batch["labels"][batch["labels"] != IGNORED_LABEL] = plain.run(drafter, batch).draft.predicted_ids
    hindsight = plain.run(drafter, batch).head
    step = DraftStep(drafter, target, CROSS_ENTROPY, length_labels="truncated", length_scale=0.1)
    with torch.no_grad():
        head.out.bias.fill_(-9)  # asks for the two rows that are always verified
    outcome = step.run(drafter, batch).head
    assert torch.equal(outcome.labels, hindsight.labels) and outcome.labels.unique().tolist() == [1.0]
    torch.testing.assert_close(outcome.loss, (outcome.ratio - 2 / 4).square().mean())
    with pytest.raises(InvalidInputError, match="length_labels"):
        DraftStep(drafter, target, CROSS_ENTROPY, length_labels="seen")


def test_target_logit_rules_apply_to_the_teacher(target):
    capped = tiny_target("llama")
    capped.config.final_logit_softcapping = 2.0
    step = DraftStep(tiny_drafter(capped), capped, MIXTURE, teacher="full")
    rows = 10 * torch.randn(3, 32)
    logits = step._target_logits(rows, capped.lm_head)
    assert logits.abs().max() <= 2 and torch.equal(logits, 2 * torch.tanh(capped.lm_head(rows) / 2))


def test_a_missing_teacher_is_named(target, tmp_path):
    drafter = tiny_drafter(target)
    batch = batch_of(make_trajectories(tmp_path, target, count=2), drafter, features=False)
    with pytest.raises(InvalidInputError, match="teacher"):
        DraftStep(drafter, target, MIXTURE, teacher="top_k").run(drafter, batch)
