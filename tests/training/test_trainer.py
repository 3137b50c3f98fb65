"""The trainer: accumulation, refusals that change nothing, files, resuming."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from treadle_server import LanguageModel, Trainer
from treadle_server.errors import CheckpointError, InvalidRequestError, TrainingError
from treadle_server.training import state_files, trainer

IDS = [[5, 9, 2, 7, 7, 1], [3, 8, 4], [6, 6, 1, 0]]
LABELS = [[5, 9, -100, 7, 7, 1], [3, -100, 4], [-100, 6, 1, 0]]


def train(one: Trainer, num_steps: int) -> None:
    """Do steps whose batches depend on the step alone."""
    for _ in range(num_steps):
        rows = np.random.default_rng(one.step).integers(0, 40, (2, 6))
        one.forward_backward(rows)
        one.optim_step(lr=1e-2, weight_decay=0.1, grad_clip_norm=1.0)


def same(first: Trainer, second: Trainer) -> bool:
    """Tell whether two trainers have the same parameters, to the bit."""
    left, right = first.parameters(), second.parameters()
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_rows_are_sequences_of_their_own(load_trainer: Any) -> None:
    """A batch's summed loss and gradient are those of its rows, one by one."""
    whole, alone = load_trainer(dtype="float64"), load_trainer(dtype="float64")
    loss = whole.forward_backward(IDS, LABELS, reduction="sum").loss
    losses = [alone.forward_backward([row], [own], reduction="sum").loss for row, own in zip(IDS, LABELS, strict=True)]
    assert loss == pytest.approx(sum(losses), rel=1e-12)
    expected = alone.gradients()
    for name, gradient in whole.gradients().items():
        assert np.allclose(gradient, expected[name], rtol=1e-9, atol=1e-12), name


def test_a_mean_in_parts_is_the_mean_of_the_whole(load_trainer: Any) -> None:
    """Also where the parts count different numbers of tokens."""
    whole, parts = load_trainer(dtype="float64"), load_trainer(dtype="float64")
    norm = whole.forward_backward(IDS, LABELS).grad_norm
    for row, own in zip(IDS, LABELS, strict=True):
        result = parts.forward_backward([row], [own])
    assert result.grad_norm == pytest.approx(norm, rel=1e-12)
    whole.optim_step(lr=0.1)
    parts.optim_step(lr=0.1)
    for name, array in whole.parameters().items():
        assert np.allclose(array, parts.parameters()[name], rtol=0, atol=1e-8), name


def test_mean_and_sum_differ_by_the_weights(load_trainer: Any) -> None:
    """The result names which it is, and counts labels, not weights."""
    one, weights = load_trainer(), [[2.0] * len(row) for row in IDS]
    mean, total = (one.compute_loss(IDS, LABELS, weights=weights, reduction=kind) for kind in ("mean", "sum"))
    assert (mean.reduction, total.reduction) == ("mean", "sum")
    assert mean.num_tokens == total.num_tokens == 8
    assert total.loss == pytest.approx(16 * mean.loss)
    assert mean.loss == pytest.approx(one.compute_loss(IDS, LABELS).loss)


def test_logprobs_explain_the_loss(load_trainer: Any) -> None:
    """Their mean over the counted labels is minus the loss; a loss alone has no gradients."""
    one = load_trainer()
    result = one.compute_loss(IDS, LABELS)
    assert [len(row) for row in result.logprobs] == [6, 3, 4]
    assert sum(row.sum() for row in result.logprobs) == pytest.approx(-result.loss * result.num_tokens)
    assert result.grad_norm is None
    with pytest.raises(TrainingError, match="no gradients wait for a step"):
        one.gradients()


def test_logits_in_pieces_change_nothing(load_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head sees two rows at a time and the gradient stays what it was."""
    one, two = load_trainer(dtype="float64"), load_trainer(dtype="float64")
    one.forward_backward(IDS, LABELS)
    monkeypatch.setattr("treadle_server.training.loss_pass.MAX_LOGITS", 2 * 200)
    monkeypatch.setattr("treadle_server.training.loss_pass.MIN_ROWS", 1)
    two.forward_backward(IDS, LABELS)
    for name, gradient in one.gradients().items():
        assert np.allclose(gradient, two.gradients()[name], rtol=1e-10, atol=1e-14), name


def test_steps_lower_the_loss(load_trainer: Any) -> None:
    """With every optimizer, on one batch."""
    for optimizer, lr in (("adamw", 1e-2), ("sgd", 0.1), ("lion", 1e-3)):
        one = load_trainer(optimizer=optimizer)
        losses = []
        for _ in range(4):
            losses.append(one.forward_backward(IDS, LABELS).loss)
            one.optim_step(lr=lr)
        assert losses == sorted(losses, reverse=True), optimizer


def test_a_policy_gradient_raises_what_was_good(load_trainer: Any) -> None:
    """A step on tokens of advantage 1 makes them likelier, one on -1 unlikelier."""
    for loss in ("importance_sampling", "ppo"):
        for sign in (1.0, -1.0):
            one = load_trainer(optimizer="sgd")
            before = one.compute_loss(IDS).logprobs
            advantages = [[sign] * len(row) for row in IDS]
            one.forward_backward(IDS, loss=loss, logprobs=before, advantages=advantages)
            one.optim_step(lr=0.1)
            after = one.compute_loss(IDS).logprobs
            assert np.sign(sum((b - a).sum() for a, b in zip(before, after, strict=True))) == sign


def test_frozen_tensors_stay_and_have_no_gradient(load_trainer: Any) -> None:
    """They count for no norm either."""
    one = load_trainer(frozen=("*embed_tokens*", "*.mlp.*"))
    before = one.parameters()
    one.forward_backward(IDS)
    frozen = {name for name in before if "embed_tokens" in name or ".mlp." in name}
    assert one.gradients().keys() == before.keys() - frozen
    one.optim_step(lr=0.1, weight_decay=0.1)
    for name, array in one.parameters().items():
        assert np.array_equal(array, before[name]) == (name in frozen), name


def test_weight_decay_spares_what_it_is_told_to(load_trainer: Any) -> None:
    """A rate of 1 and a decay of 1 leave nothing of the others but the step."""
    one = load_trainer(optimizer="sgd", no_decay=("*norm.weight",))
    before = one.parameters()
    one.forward_backward(IDS)
    gradients = one.gradients()
    one.optim_step(lr=1.0, weight_decay=1.0)
    for name, array in one.parameters().items():
        kept = before[name] if name.endswith("norm.weight") else 0
        assert np.allclose(array, kept - gradients[name], atol=1e-6), name


def test_scales_stored_minus_one_train_as_stored(load_trainer: Any) -> None:
    """Decay pulls Gemma's stored numbers to 0, not the scales that it computes with."""
    one = load_trainer("models/gemma", optimizer="sgd", dtype="float64")
    before = one.parameters()
    loss = one.forward_backward(IDS).loss
    gradients = one.gradients()
    one.optim_step(lr=0.01, weight_decay=1.0)
    name = "model.norm.weight"
    assert np.allclose(one.parameters()[name], 0.99 * before[name] - 0.01 * gradients[name])
    assert one.compute_loss(IDS).loss != loss


def test_resuming_is_exact(load_trainer: Any, tmp_path: Path) -> None:
    """Five steps, a save, five more from the files: the same bits as ten, for every optimizer and format."""
    for optimizer, dtype in (("adamw", None), ("adamw", "bfloat16"), ("lion", None)):
        straight, first = (load_trainer(optimizer=optimizer) for _ in range(2))
        train(straight, 10)
        train(first, 5)
        first.save(tmp_path / "saved", dtype=dtype)
        second = Trainer.load(tmp_path / "saved", optimizer=optimizer)
        second.load_state(tmp_path / "saved")
        assert second.step == 5
        train(second, 5)
        assert same(straight, second)


def test_resuming_is_exact_with_frozen_tensors(load_trainer: Any, tmp_path: Path) -> None:
    """They have no state to be saved."""
    straight, first, second = (load_trainer(frozen=("*embed_tokens*",)) for _ in range(3))
    train(straight, 4)
    train(first, 2)
    first.save(tmp_path / "saved")
    second.load_state(tmp_path / "saved")
    train(second, 2)
    assert same(straight, second)


def test_a_state_that_lacks_an_array_is_refused(load_trainer: Any, tmp_path: Path) -> None:
    """The tensor that it belongs to is named."""
    one = load_trainer()
    train(one, 1)
    one.save(tmp_path / "saved")
    state = state_files.read_state(tmp_path / "saved")
    tensors = {name: array for name, array in state.tensors.items() if name != "first_moment/final_norm.weight"}
    state_files.write_state(tmp_path / "saved", state_files.TrainerState(1, "adamw", tensors))
    with pytest.raises(CheckpointError, match=r"the optimizer's state of model\.norm\.weight does not fit"):
        one.load_state(tmp_path / "saved")


def test_resuming_is_exact_where_scales_are_stored_minus_one(load_trainer: Any, tmp_path: Path) -> None:
    """Gemma, from a bfloat16 folder."""
    straight, first = load_trainer("models/gemma"), load_trainer("models/gemma")
    train(straight, 4)
    train(first, 2)
    first.save(tmp_path / "saved")
    second = load_trainer("models/gemma")
    second.load_state(tmp_path / "saved")
    train(second, 2)
    assert same(straight, second)


def test_a_saved_folder_is_served(tiny_folder: Path, tmp_path: Path) -> None:
    """A server that loads it gives the trained model's probabilities."""
    one = Trainer.load(tiny_folder)
    train(one, 2)
    one.save(tmp_path / "saved")
    with LanguageModel.load(tmp_path / "saved") as model:
        logits = model.logits(IDS[0]).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert np.allclose(one.compute_loss(IDS).logprobs[0][1:], logprobs[np.arange(5), IDS[0][1:]], atol=1e-4)


def test_saving_over_an_older_folder_replaces_it(load_trainer: Any, tmp_path: Path) -> None:
    """Nothing of the old one is left, and no scratch folder either."""
    one = load_trainer()
    one.save(tmp_path / "saved")
    (tmp_path / "saved" / "old").write_text("old")
    train(one, 1)
    one.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert not (tmp_path / "saved" / "old").exists()
    assert same(one, Trainer.load(tmp_path / "saved"))


def test_a_full_disk_keeps_the_older_folder(load_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the folder; what was there loads as before."""
    one = load_trainer()
    one.save(tmp_path / "saved")
    before = Trainer.load(tmp_path / "saved")
    train(one, 1)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_files, "_flush", fail)
    with pytest.raises(CheckpointError, match=r"saved: cannot be written: .*No space left"):
        one.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert same(before, Trainer.load(tmp_path / "saved"))


def test_no_folder_but_a_trainers_own_is_replaced(load_trainer: Any, tmp_path: Path) -> None:
    """Not a folder of other things, and not a file."""
    (tmp_path / "home").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("home", "file"):
        with pytest.raises(CheckpointError, match=f"{name}: exists and was not saved by a trainer"):
            load_trainer().save(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_save_that_was_killed_between_its_renames_is_settled(load_trainer: Any, tmp_path: Path) -> None:
    """The older folder stands under its other name; loading brings it back."""
    one = load_trainer()
    one.save(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / "saved.previous")
    (tmp_path / "saved.partial").mkdir()
    assert same(one, Trainer.load(tmp_path / "saved"))


def test_a_link_to_a_saved_folder_is_replaced_itself(load_trainer: Any, tmp_path: Path) -> None:
    """As often as one saves there, and what it led to stays."""
    one = load_trainer()
    one.save(tmp_path / "saved")
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    train(one, 1)
    for _ in range(3):
        one.save(tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "saved"]
    assert not (tmp_path / "link").is_symlink()
    assert same(load_trainer(), Trainer.load(tmp_path / "saved"))


def test_a_nan_in_the_parameters_is_named(load_trainer: Any) -> None:
    """The loss is refused, no gradients wait, and the parameter is named."""
    one = load_trainer()
    one._decoder.parameters["layers.1.mlp.down.weight"][0, 0] = np.nan
    with pytest.raises(TrainingError, match=r"loss is nan.*parameter model.layers.1.mlp.down_proj.weight is not fin"):
        one.forward_backward(IDS)
    with pytest.raises(TrainingError, match="no gradients wait"):
        one.optim_step(lr=0.1)


def test_parameters_that_are_not_finite_replace_no_saved_ones(load_trainer: Any, tmp_path: Path) -> None:
    """A rate out of this world makes them; neither a save nor a publication takes them."""
    one = load_trainer()
    one.save(tmp_path / "saved")
    one.forward_backward(IDS)
    one.optim_step(lr=1e39)
    for save in (one.save, one.save_weights, one.save_merged):
        with pytest.raises(TrainingError, match=r"model\.embed_tokens\.weight is not finite: nothing was saved"):
            save(tmp_path / "saved")
    one.load_state(tmp_path / "saved")
    assert same(one, load_trainer())


@pytest.mark.parametrize("weight", [1e-12, 1e12])
def test_one_weight_for_all_changes_no_mean(load_trainer: Any, weight: float) -> None:
    """The norm of the gradients is the same to float32, however small or large the weights are."""
    one, other = load_trainer(optimizer="sgd"), load_trainer(optimizer="sgd")
    found = one.forward_backward(IDS, weights=[[weight] * len(row) for row in IDS])
    wanted = other.forward_backward(IDS)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    one.optim_step(lr=0.1, grad_clip_norm=0.5)
    other.optim_step(lr=0.1, grad_clip_norm=0.5)
    for name, array in other.parameters().items():
        np.testing.assert_allclose(one.parameters()[name], array, rtol=1e-5, atol=1e-6)


def test_a_loss_that_overflows_is_refused(load_trainer: Any) -> None:
    """Where no parameter is to blame, the message says so; a loss without gradients is refused as well."""
    one = load_trainer()
    rows = [[-1000.0] * len(row) for row in IDS]
    for call in (one.forward_backward, one.compute_loss):
        with pytest.raises(TrainingError, match=r"loss is -inf.*Every parameter is finite"):
            call(IDS, loss="importance_sampling", logprobs=rows, advantages=[[1.0] * len(row) for row in IDS])


def test_gradients_that_overflow_together_are_refused(load_trainer: Any) -> None:
    """The step changes nothing; forgetting them lets training go on."""
    one, other = load_trainer(), load_trainer()
    one.forward_backward(IDS)
    one._gathered.sums["final_norm.weight"][0] = np.inf
    one.forward_backward(IDS)
    with pytest.raises(TrainingError, match="gradients' norm is inf: nothing was changed; zero_gradients forgets them"):
        one.optim_step(lr=0.1)
    assert one.step == 0
    one.zero_gradients()
    train(one, 1)
    train(other, 1)
    assert same(one, other)


def test_a_gradient_that_is_not_finite_is_named_and_refused(load_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was gathered before stays and can be stepped on."""
    one, other = load_trainer(), load_trainer()
    for each in (one, other):
        each.forward_backward(IDS)
    backward = trainer.ParallelPass.backward

    def broken(self: trainer.ParallelPass) -> dict[str, Any]:
        grads = backward(self)
        grads["layers.0.attention.q.weight"][1, 1] = np.inf
        return grads

    monkeypatch.setattr(trainer.ParallelPass, "backward", broken)
    with pytest.raises(TrainingError, match=r"gradient of model.layers.0.self_attn.q_proj.weight is not finite"):
        one.forward_backward(IDS)
    one.optim_step(lr=0.1)
    other.optim_step(lr=0.1)
    assert same(one, other)


def test_gradients_too_large_to_square_in_float32_are_finite(load_trainer: Any) -> None:
    """Their norm is worked out in float64."""
    one = load_trainer()
    rows = [[1e28] * len(row) for row in IDS]
    logprobs = [[-3.0] * len(row) for row in IDS]
    result = one.forward_backward(IDS, loss="importance_sampling", advantages=rows, logprobs=logprobs, reduction="sum")
    assert 1e24 < result.grad_norm < 1e30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "hinge"}, "loss: must be one of cross_entropy, importance_sampling, ppo, but is 'hinge'"),
        ({"reduction": "median"}, "reduction: must be mean or sum, but is 'median'"),
        ({"clip_range": 0.1}, "clip_range: is no option of cross_entropy; its options: label_smoothing, z_loss"),
        ({"label_smoothing": 1.5}, "label_smoothing: must be 0 to 1, but is 1.5"),
        ({"label_smoothing": "much"}, "label_smoothing: must be 0 to 1, but is 'much'"),
        ({"z_loss": float("nan")}, "z_loss: must be 0 to inf, but is nan"),
        ({"loss": "ppo"}, "logprobs: must be given"),
    ],
)
def test_bad_loss_arguments_are_refused(load_trainer: Any, arguments: dict[str, Any], message: str) -> None:
    """The field, what it may be, and what it was."""
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        load_trainer().forward_backward(IDS, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr: must be finite and 0 or more, but is -1"),
        ({"lr": float("inf")}, "lr: must be finite and 0 or more, but is inf"),
        ({"lr": "fast"}, "lr: must be finite and 0 or more, but is 'fast'"),
        ({"eps": 0.0}, "eps: must be 1e-30 or more, but is 0"),
        ({"weight_decay": -0.1}, "weight_decay: must be finite and 0 or more"),
        ({"grad_clip_norm": 0.0}, "grad_clip_norm: must be finite and over 0, but is 0"),
        ({"betas": (0.9, 1.0)}, r"betas: must be two numbers from 0 to below 1, but is \(0.9, 1.0\)"),
        ({"betas": 0.9}, "betas: must be two numbers"),
        ({"eps": "small"}, "eps: must be a finite number, 0 or more, but is 'small'"),
        ({"momentum": 0.9}, "momentum: is no option of adamw; its options: betas, eps"),
    ],
)
def test_bad_step_arguments_are_refused(load_trainer: Any, arguments: dict[str, Any], message: str) -> None:
    """The gradients wait on, and a good step follows."""
    one = load_trainer()
    one.forward_backward(IDS)
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        one.optim_step(**{"lr": 0.1} | arguments)
    assert one.optim_step(lr=0.1).step == 1


def test_a_step_needs_gradients_of_its_own(load_trainer: Any) -> None:
    """A step uses them up; forgetting them does too."""
    one = load_trainer()
    one.forward_backward(IDS)
    one.optim_step(lr=0.1)
    one.forward_backward(IDS)
    one.zero_gradients()
    with pytest.raises(TrainingError, match="call forward_backward first"):
        one.optim_step(lr=0.1)


def test_means_and_sums_do_not_mix(load_trainer: Any) -> None:
    """Neither would be what its name says."""
    one = load_trainer()
    one.forward_backward(IDS)
    with pytest.raises(TrainingError, match="gradients of mean losses wait for a step; they cannot take a sum"):
        one.forward_backward(IDS, reduction="sum")


def test_a_row_longer_than_the_positions_is_refused(load_trainer: Any) -> None:
    """Learned positions end; the message says where."""
    with pytest.raises(InvalidRequestError, match=r"^input_ids: rows must have at most \d+ tokens, but one has 5000"):
        load_trainer("train/gpt2").forward_backward([[1] * 5000])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "newton"}, "optimizer: must be one of adamw, sgd, lion, but is 'newton'"),
        ({"frozen": ["lm_had"]}, "frozen: must name tensors of the checkpoint, but 'lm_had' names none"),
        ({"no_decay": ["*nrom*"]}, "no_decay: must name tensors of the checkpoint, but"),
    ],
)
def test_bad_settings_are_refused(load_trainer: Any, options: dict[str, Any], message: str) -> None:
    """Before anything is trained."""
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        load_trainer(**options)


def test_only_its_own_state_is_loaded(load_trainer: Any, tmp_path: Path, golden: Path) -> None:
    """Not another model's, another optimizer's, a broken one or none; the trainer stays as it was."""
    one, other = load_trainer(), load_trainer()
    train(one, 1)
    train(other, 1)
    one.save(tmp_path / "llama")
    wrong_model, wrong_optimizer = load_trainer("train/gpt2"), load_trainer(optimizer="lion")
    with pytest.raises(CheckpointError, match="is another model"):
        wrong_model.load_state(tmp_path / "llama")
    with pytest.raises(TrainingError, match="has the state of adamw, but this trainer's is lion"):
        wrong_optimizer.load_state(tmp_path / "llama")
    with pytest.raises(CheckpointError, match=r"llama: has no trainer_state\.json"):
        one.load_state(golden / "train" / "llama")
    (tmp_path / "llama" / "trainer_state.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(CheckpointError, match="must have format 1"):
        one.load_state(tmp_path / "llama")
    assert same(one, other)


def test_an_unknown_format_is_refused(load_trainer: Any, tmp_path: Path) -> None:
    """And nothing is written."""
    with pytest.raises(InvalidRequestError, match=r"^dtype: must be float64, float32, float16 or bfloat16"):
        load_trainer().save(tmp_path / "saved", dtype="int8")
    assert not list(tmp_path.iterdir())
