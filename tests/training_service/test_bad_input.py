"""Every wrong batch, loss and step has a clear status and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from treadle_client import ConflictError, InvalidArgumentError, TrainingClient, TrainingRow

Run = Callable[..., AbstractContextManager[str]]
IDS = [5, 9, 2, 7]


@pytest.fixture(scope="module")
def shared(training: Run, tiny_folder: Path) -> Iterator[TrainingClient]:
    """A client of a trainer that refuses all that the tests of this module ask for."""
    with training(tiny_folder) as target, TrainingClient(target, timeout_s=60) as client:
        yield client


@pytest.fixture(autouse=True)
def untouched(shared: TrainingClient) -> Iterator[None]:
    """After each test the loss, the count and the gradients are what they were."""
    before = shared.compute_loss([IDS])
    yield
    state = shared.training_state()
    assert shared.compute_loss([IDS]) == before
    assert (state.step, state.num_waiting_batches, state.next_sequence_number) == (0, 0, 1)


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ([], "batch.rows[0].token_ids", "one token at least"),
        ("", "batch.rows[0].text", "one token at least"),
        ([5, 300], "batch.rows[0].token_ids[1]", "0 to 299, but is 300"),
        (TrainingRow(IDS, labels=[5, 9, 300, 7]), "batch.rows[0].labels[2]", "0 to 299, or -100 for none, but is 300"),
        (TrainingRow(IDS, labels=[5, -1, 2, 7]), "batch.rows[0].labels[1]", "but is -1"),
        (TrainingRow(IDS, labels=[5, 9]), "batch.rows[0].labels", "row's 4 tokens, but has 2"),
        (TrainingRow(IDS, weights=[1] * 5), "batch.rows[0].weights", "row's 4 tokens, but has 5"),
        (TrainingRow(IDS, weights=[1, -1, 1, 1]), "batch.rows[0].weights[1]", "from 1e-12 to 1e+12, but is -1"),
        (TrainingRow(IDS, weights=[1, 1, 1, 1e-40]), "batch.rows[0].weights[3]", "from 1e-12 to 1e+12, but is 1e-40"),
        (TrainingRow(IDS, weights=[1, 1, float("inf"), 1]), "batch.rows[0].weights[2]", "but is inf"),
        (TrainingRow(IDS, advantages=[0, 0, 0, float("nan")]), "batch.rows[0].advantages[3]", "but is nan"),
        (TrainingRow(IDS, document_lengths=[2, 1]), "batch.rows[0].document_lengths", "sum to 3"),
        (TrainingRow(IDS, document_lengths=[4, 0]), "batch.rows[0].document_lengths", "1 or more each"),
        (TrainingRow(IDS, append_eos=True), "batch.rows[0].append_eos", "goes with a text"),
        (TrainingRow("the cat", labels=[1, 2]), "batch.rows[0].labels", "goes with token_ids only"),
    ],
)
def test_a_wrong_row_is_named(shared: TrainingClient, row: Any, field: str, message: str) -> None:
    """With the place of what is wrong, for every call that takes a batch."""
    for call in (shared.compute_loss, shared.forward_backward, lambda rows: shared.step(rows, lr=0.01)):
        with pytest.raises(InvalidArgumentError, match=r".+") as caught:
            call([row])
        assert caught.value.violations[0].field == field
        assert message in caught.value.violations[0].message


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "one row at least"),
        ([[7]], "not a row's first"),
        ([TrainingRow(IDS, labels=[-100] * 4)], "labels"),
        ([TrainingRow(IDS, weights=[0] * 4)], "labels"),
        ([TrainingRow(IDS, document_lengths=[1] * 4)], "labels"),
    ],
)
def test_a_batch_without_labels_that_count_is_refused(shared: TrainingClient, rows: Any, message: str) -> None:
    """None at all, all ignored, all of weight 0, all the first of a document."""
    with pytest.raises(InvalidArgumentError, match=message):
        shared.step(rows, lr=0.01)


@pytest.mark.parametrize(
    ("keywords", "field"),
    [
        ({"loss": "hinge"}, "loss.name"),
        ({"loss_options": {"label_smoothing": 2.0}}, "loss.options.label_smoothing"),
        ({"loss_options": {"clip_range": 0.1}}, "loss.options.clip_range"),
        ({"loss_options": {"z_loss": "much"}}, "loss.options.z_loss"),
        ({"loss_options": {"z_loss": True}}, "loss.options.z_loss"),
        ({"loss_options": {"weights": 1.0}}, "loss.options.weights"),
        ({"loss": "ppo"}, "batch.rows.logprobs"),
        ({"lr": -1.0}, "optimizer.lr"),
        ({"lr": float("nan")}, "optimizer.lr"),
        ({"betas": (0.9, 1.0)}, "optimizer.beta1"),
        ({"eps": -1.0}, "optimizer.eps"),
        ({"momentum": 0.9}, "optimizer.momentum"),
        ({"weight_decay": float("inf")}, "optimizer.weight_decay"),
        ({"grad_clip_norm": 0.0}, "optimizer.grad_clip_norm"),
        ({"optimizer_options": {"nesterov": 1}}, "optimizer.options.nesterov"),
        ({"optimizer_options": {"lr": 1.0}}, "optimizer.options.lr"),
    ],
)
def test_a_wrong_setting_is_named(shared: TrainingClient, keywords: dict[str, Any], field: str) -> None:
    """Of the loss and of the optimizer, by its field in the request."""
    with pytest.raises(InvalidArgumentError, match=r".+") as caught:
        shared.step([IDS], **{"lr": 0.01, **keywords})
    assert caught.value.violations[0].field == field


def test_a_row_that_lacks_what_others_have_is_named(shared: TrainingClient) -> None:
    """Sampled log-probabilities and advantages are given for all rows or for none."""
    policy = {"logprobs": [-1.0] * 4, "advantages": [1.0] * 4}
    with pytest.raises(InvalidArgumentError, match=r"batch\.rows\[1\]\.logprobs: must be given in every row"):
        shared.step([TrainingRow(IDS, **policy), IDS], lr=0.01, loss="ppo")


def test_steps_need_gradients(shared: TrainingClient) -> None:
    """OptimStep without any is refused."""
    with pytest.raises(ConflictError, match="no gradients wait") as caught:
        shared.optim_step(lr=0.01)
    assert caught.value.reason == "TRAINING_REFUSED"


def test_a_loss_that_is_not_finite_is_refused(shared: TrainingClient) -> None:
    """Nothing is changed by it."""
    row = TrainingRow(IDS, logprobs=[-1e6] * 4, advantages=[1.0] * 4)
    with pytest.raises(ConflictError, match="the loss is -inf: nothing was changed"):
        shared.step([row], lr=0.01, loss="importance_sampling")


def test_a_gradient_that_is_not_finite_names_its_tensor(shared: TrainingClient) -> None:
    """The weights are float32: an advantage that float64 holds overflows them."""
    row = TrainingRow(IDS, logprobs=[-1] * 4, advantages=[1e300] * 4)
    with pytest.raises(ConflictError, match=r"gradient of \S+weight is not finite") as caught:
        shared.step([row], loss="importance_sampling", lr=0.01)
    assert caught.value.reason == "TRAINING_REFUSED"


def test_reductions_do_not_mix(training: Run, tiny_folder: Path) -> None:
    """Batches that wait for one step have one; ZeroGradients lets another begin."""
    with training(tiny_folder) as target, TrainingClient(target, timeout_s=60) as client:
        client.forward_backward([IDS])
        with pytest.raises(ConflictError, match="cannot take a sum"):
            client.forward_backward([IDS], reduction="sum")
        client.zero_gradients()
        client.forward_backward([IDS], reduction="sum")


def test_weights_that_overflow_are_named(training: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """After a learning rate out of this world a loss is refused, and an earlier checkpoint mends it."""
    with training(tiny_folder, checkpoint_root=tmp_path) as target, TrainingClient(target, timeout_s=60) as client:
        client.save_checkpoint("good")
        before = client.compute_loss([IDS])
        client.step([IDS], lr=1e39)
        with pytest.raises(ConflictError, match="load an earlier checkpoint"):
            client.compute_loss([IDS])
        with pytest.raises(ConflictError, match="nothing was saved; load an earlier checkpoint"):
            client.save_checkpoint("good")
        client.load_checkpoint("good", with_optimizer=True)
        assert client.compute_loss([IDS]) == before


def test_documents_over_a_hard_limit_are_refused(training: Run, golden: Path) -> None:
    """A model with learned positions has no more of them; a longer row of short documents is fine."""
    with training(golden / "models" / "gpt2") as target, TrainingClient(target, timeout_s=60) as client:
        limit = client.training_state().context_length
        with pytest.raises(InvalidArgumentError, match=f"at most {limit} tokens, but one has {limit + 1}"):
            client.compute_loss([[1] * (limit + 1)])
        client.compute_loss([TrainingRow([1] * (limit + 2), document_lengths=[limit, 2])])
