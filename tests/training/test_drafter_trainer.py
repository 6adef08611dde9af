from __future__ import annotations

import shutil

import pytest
import torch
from tiny_models import tiny_drafter, tiny_target
from tiny_trainer import LAYER_IDS, KillAt, make_trainer, weights_of
from tiny_trajectories import make_trajectories, run_until_killed

from adaflash_hf import ConfidenceHeadModel, DFlashDrafterModel
from adaflash_hf.errors import DrafterCompatibilityError, InvalidInputError, TrainingDivergedError
from adaflash_hf.training.drafter_trainer import DrafterTrainer, last_complete_checkpoint
from adaflash_hf.training.initialization import new_confidence_head
from adaflash_hf.training.optimizers import MuonWithAdamW
from adaflash_hf.training.training_arguments import DrafterTrainingArguments
from adaflash_hf.training.trajectory_dataset import TrajectoryDataset


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def directory(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("trajectories")
    return make_trajectories(path, target, teacher_top_k=8, capture_layer_ids=tuple(LAYER_IDS))


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("fields", [{"objective": "cross_entropy"}, {"use_muon": True, "vocabulary_size": 60}])
def test_it_learns_what_it_sees(target, directory, tmp_path, fields):
    trainer = make_trainer(target, directory, tmp_path, num_train_epochs=15, learning_rate=2e-2, **fields)
    seen = trainer.train_dataset
    before = trainer.evaluate(seen)
    trainer.train()
    after = trainer.evaluate(seen)
    assert after["eval_hard_loss"] < 0.5 * before["eval_hard_loss"]
    assert after["eval_acceptance_length"] > before["eval_acceptance_length"] + 0.5
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert {"acceptance_length", "hard_loss", "clipped_share"} <= set(logged[-1])


def test_metrics_do_not_depend_on_the_batch_size(target, directory, tmp_path):
    one = make_trainer(target, directory, tmp_path, with_head=True).evaluate()
    three = make_trainer(target, directory, tmp_path, with_head=True, per_device_eval_batch_size=3).evaluate()
    assert {"eval_acceptance_length_math", "eval_acceptance_position_3", "eval_length_head_error"} <= set(one)
    for name in set(one) - {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}:
        assert one[name] == pytest.approx(three[name], rel=1e-5)


@pytest.mark.parametrize(
    ("train_only", "head_changes", "drafter_changes"),
    [(None, True, True), ("drafter", False, True), ("length_head", True, False)],
)
def test_only_what_is_asked_for_is_trained(target, directory, tmp_path, train_only, head_changes, drafter_changes):
    trainer = make_trainer(target, directory, tmp_path, with_head=True, train_only=train_only, num_train_epochs=1)
    before = weights_of(trainer)
    trainer.train()
    head = {name for name in before if name.startswith("length_head.")}
    assert changed(before, weights_of(trainer)) == (head if head_changes else set()) | (
        set(before) - head if drafter_changes else set()
    )
    assert not any(parameter.requires_grad for parameter in trainer.target_model.parameters())


def test_a_confidence_head_learns_on_a_frozen_drafter(target, directory, tmp_path):
    drafter = tiny_drafter(target, seed=4)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    trainer = make_trainer(
        target,
        directory,
        tmp_path,
        train_only="confidence_head",
        confidence_head=new_confidence_head(drafter),
        num_train_epochs=4,
        length_head_learning_rate=3e-2,
        save_strategy="epoch",
    )
    first = trainer.evaluate(trainer.train_dataset)
    trainer.train()
    last = trainer.evaluate(trainer.train_dataset)
    assert last["eval_confidence_head_loss"] < first["eval_confidence_head_loss"]
    assert last["eval_confidence_head_error"] < first["eval_confidence_head_error"]
    assert last["eval_acceptance_length"] == first["eval_acceptance_length"]
    frozen = trainer.draft_step.drafter.state_dict()
    assert all(torch.equal(frozen[name], value) for name, value in before.items())
    saved = ConfidenceHeadModel.from_pretrained(last_complete_checkpoint(tmp_path))
    torch.testing.assert_close(saved.proj.weight, trainer.confidence_head.proj.weight)


def test_a_confidence_head_must_fit(target, directory, tmp_path):
    with pytest.raises(InvalidInputError, match="train_only"):
        make_trainer(target, directory, tmp_path, train_only="confidence_head")
    other = new_confidence_head(tiny_drafter(target, block_size=6))
    with pytest.raises(InvalidInputError, match="new_confidence_head"):
        make_trainer(target, directory, tmp_path, train_only="confidence_head", confidence_head=other)


def test_the_head_does_not_disturb_the_drafter(target, directory, tmp_path):
    runs = []
    for train_only in (None, "drafter"):
        trainer = make_trainer(
            target, directory, tmp_path, with_head=True, train_only=train_only, num_train_epochs=1, max_grad_norm=0.0
        )
        trainer.train()
        runs.append({name: value for name, value in weights_of(trainer).items() if "length_head" not in name})
    assert not changed(*runs)


def test_features_on_the_fly_train_the_same_drafter(target, directory, tmp_path):
    runs = []
    for features in (True, False):
        trainer = make_trainer(target, directory, tmp_path, features=features, num_train_epochs=1)
        trainer.train()
        runs.append(weights_of(trainer))
    for name, value in runs[0].items():
        # Adam divides by the gradient's size, which for tiny ones amplifies the rounding of the features.
        torch.testing.assert_close(value, runs[1][name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("use_muon", [True, False])
def test_killed_and_resumed_gives_the_weights_of_an_uninterrupted_run(target, directory, tmp_path, use_muon):
    # Nine trajectories in five batches, accumulated in pairs: three steps an epoch, the last one of a single batch.
    fields = {
        "with_head": True,
        "use_muon": use_muon,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "vocabulary_size": 80,
        "draft_vocabulary": True,
    }
    whole = make_trainer(target, directory, tmp_path / "whole", **fields)
    whole.train()
    assert whole.state.global_step == 9
    killed = tmp_path / "killed"

    def train_and_die():
        make_trainer(target, directory, killed, callbacks=[KillAt(5)], **fields).train()

    run_until_killed(train_and_die)
    assert last_complete_checkpoint(killed).name == "checkpoint-4"
    # A checkpoint that was being written when the run was killed is not one.
    shutil.copytree(killed / "checkpoint-4", killed / "checkpoint-5")
    (killed / "checkpoint-5" / "trainer_state.json").write_text('{"global_step": 5')
    resumed = make_trainer(target, directory, killed, **fields)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 9
    assert not changed(weights_of(whole), weights_of(resumed))
    assert resumed.model.config.draft_vocab_size == len(resumed.vocabulary) <= 80
    assert torch.equal(whole.model.draft_token_ids, resumed.model.draft_token_ids)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth"])
def test_a_damaged_checkpoint_is_passed_over(target, directory, tmp_path, caplog, name):
    make_trainer(target, directory, tmp_path, max_steps=4, save_strategy="steps", save_steps=2).train()
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-4"
    path = tmp_path / "checkpoint-4" / name
    path.write_bytes(path.read_bytes()[:-100])
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-2"
    assert f"{name} is damaged, so that checkpoint-4 is passed over" in caplog.text
    resumed = make_trainer(target, directory, tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4 and last_complete_checkpoint(tmp_path).name == "checkpoint-4"


def test_resuming_without_a_checkpoint_starts_anew(target, directory, tmp_path):
    assert last_complete_checkpoint(tmp_path) is None
    trainer = make_trainer(target, directory, tmp_path, num_train_epochs=1)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5


def test_learning_rates_of_the_groups(target, directory, tmp_path):
    fields = {"use_muon": True, "vector_learning_rate": 5e-4, "length_head_learning_rate": 7e-4}
    optimizer = make_trainer(target, directory, tmp_path, with_head=True, **fields).create_optimizer()
    assert isinstance(optimizer, MuonWithAdamW)
    assert [(group["lr"], group["use_muon"]) for group in optimizer.param_groups] == [
        (2e-3, True), (5e-4, False), (7e-4, False)
    ]  # fmt: skip
    plain = make_trainer(target, directory, tmp_path, with_head=True).create_optimizer()
    assert [group["lr"] for group in plain.param_groups] == [2e-3, 2e-3, 2e-4]


def test_float32_weights_train_for_a_bfloat16_target(directory, tmp_path):
    target = tiny_target("llama").to(torch.bfloat16)
    trainer = make_trainer(target, directory, tmp_path, num_train_epochs=1, teacher="full", bf16=True)
    before = weights_of(trainer)
    trainer.train()
    after = weights_of(trainer)
    assert changed(before, after) and all(value.dtype == torch.float32 for value in after.values())
    assert all(value.isfinite().all() for value in after.values())


def test_recomputed_activations_give_the_same_weights(target, directory, tmp_path):
    weights, calls = [], []
    for gradient_checkpointing in (False, True):
        trainer = make_trainer(
            target, directory, tmp_path, num_train_epochs=1, gradient_checkpointing=gradient_checkpointing
        )
        count = 0

        def count_call(*args):
            nonlocal count
            count += 1

        # Before, not after: recomputing a layer stops when it has what the backward pass needs.
        trainer.model.layers[0].mlp.register_forward_pre_hook(count_call)
        trainer.train()
        weights.append(weights_of(trainer))
        calls.append(count)
    assert not changed(*weights)
    assert calls == [5, 10]  # of five batches


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "in_place"])
def test_a_compiled_drafter_trains_to_the_same_weights(target, directory, tmp_path, how):
    torch._dynamo.reset()
    plain = make_trainer(target, directory, tmp_path / "plain", with_head=True, max_steps=2)
    plain.train()
    trainer = make_trainer(target, directory, tmp_path / how, with_head=True, max_steps=2)
    if how == "in_place":
        trainer.model.compile(backend="eager", dynamic=True)
    else:
        compiled = torch.compile(trainer.model, backend="eager", dynamic=True)
        trainer = DrafterTrainer(compiled, target, trainer.args, trainer.train_dataset)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trainer.train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs
    expected = weights_of(plain)
    for name, value in weights_of(trainer).items():
        torch.testing.assert_close(value, expected[name.replace("_orig_mod.", "")], atol=1e-6, rtol=1e-5)
    trainer.save_drafter(tmp_path / "saved")
    assert DFlashDrafterModel.from_pretrained(tmp_path / "saved").state_dict().keys() == expected.keys()


def test_attention_is_that_of_training_only_while_it_trains(target, directory, tmp_path):
    trainer = make_trainer(target, directory, tmp_path, drafter_attention="eager", num_train_epochs=1)
    config, seen = trainer.model.config, set()
    trainer.model.register_forward_pre_hook(lambda *args: seen.add(config._attn_implementation))
    assert trainer.attention == ("eager", "given") and config._attn_implementation == "sdpa"
    trainer.evaluate()
    trainer.train()
    assert seen == {"eager"} and config._attn_implementation == "sdpa"
    with pytest.raises(InvalidInputError, match="no backward pass on cpu"):
        make_trainer(target, directory, tmp_path, drafter_attention="flex_attention")
    with pytest.raises(InvalidInputError, match="drafter_attention"):
        make_trainer(target, directory, tmp_path, drafter_attention="flash_attention_2")


def test_diverged_training_ends_and_leaves_no_weights(target, directory, tmp_path):
    fields = {"learning_rate": 1e30, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(target, directory, tmp_path, **fields)
    with pytest.raises(
        TrainingDivergedError, match=r"By step \d .*`learning_rate` \(--learning-rate\), which is 1e\+30"
    ):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))
    with pytest.raises(TrainingDivergedError, match="nothing was written"):
        trainer.save_drafter(tmp_path / "drafter")
    assert not (tmp_path / "drafter" / "config.json").exists()


def test_contradictions_are_refused(target, directory, tmp_path):
    with pytest.raises(InvalidInputError, match="attach_length_head"):
        make_trainer(target, directory, tmp_path, train_only="length_head")
    with pytest.raises(InvalidInputError, match="dataloader_persistent_workers"):
        make_trainer(target, directory, tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    with pytest.raises(InvalidInputError, match="without the target's likeliest tokens"):
        make_trainer(target, make_trajectories(tmp_path / "t", target), tmp_path, teacher="top_k", features=False)
    args = DrafterTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(InvalidInputError, match="train_dataset"):
        DrafterTrainer(tiny_drafter(target), target, args, [1, 2])
    with pytest.raises(DrafterCompatibilityError):
        DrafterTrainer(tiny_drafter(num_target_layers=9), target, args, TrajectoryDataset(directory))
    trainer = make_trainer(target, directory, tmp_path)
    trainer.eval_dataset = None
    with pytest.raises(InvalidInputError, match="eval_dataset"):
        trainer.evaluate()
