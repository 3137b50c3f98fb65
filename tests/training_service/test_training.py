"""Losses, gradients and steps by RPC: the same numbers as in process, and nothing half done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from treadle_client import (
    AsyncTrainingClient,
    ConflictError,
    DeadlineExceededError,
    InvalidArgumentError,
    QueueFullError,
    TrainingClient,
    TrainingRow,
)
from treadle_server import Trainer
from treadle_server.tokenizer import Tokenizer

Run = Callable[..., AbstractContextManager[str]]
IDS = [[5, 9, 2, 7, 7, 1], [3, 8, 4], [6, 6, 1, 0]]
SLOW_ROW = [1] * 20_000  # tenths of a second for the tiny model


def test_a_loss_is_the_trainers(client: TrainingClient, tiny_folder: Path) -> None:
    """Loss, counts and logprobs of ragged rows are those of `Trainer`, and name their reduction."""
    expected = Trainer.load(tiny_folder).compute_loss(IDS)
    result = client.compute_loss(IDS)
    assert (result.loss, result.num_tokens, result.reduction) == (expected.loss, expected.num_tokens, "mean")
    assert [list(row) for row in result.logprobs] == [row.tolist() for row in expected.logprobs]
    assert (result.name, result.grad_norm, result.token_ids) == ("cross_entropy", None, ((), (), ()))
    total = client.compute_loss(IDS, reduction="sum")
    assert (total.reduction, total.loss) == ("sum", pytest.approx(10 * result.loss))


def test_labels_are_shifted_by_the_server(client: TrainingClient) -> None:
    """The label of a place is predicted by the token before it; a first label and -100 count for nothing."""
    row = TrainingRow([5, 9, 2], labels=[7, -100, 2])
    assert client.compute_loss([row]).num_tokens == 1
    weighted = TrainingRow([5, 9, 2], weights=[1, 0, 3])
    assert client.compute_loss([weighted]).loss == client.compute_loss([row]).loss


def test_documents_of_a_row_see_nothing_of_each_other(client: TrainingClient) -> None:
    """A packed row has the numbers of its documents as rows, put together again."""
    packed = TrainingRow([*IDS[0], *IDS[1]], document_lengths=[6, 3])
    together, apart = client.compute_loss([packed, IDS[2]]), client.compute_loss(IDS)
    assert together.loss == apart.loss
    assert together.logprobs == (apart.logprobs[0] + apart.logprobs[1], apart.logprobs[2])


def test_texts_and_messages_are_tokenised(client: TrainingClient, tiny_folder: Path) -> None:
    """Their tokens come back, and are what the token ids would have given."""
    tokenizer = Tokenizer.load(tiny_folder)
    messages = [{"role": "user", "content": "hi"}]
    result = client.compute_loss([TrainingRow("the cat", append_eos=True), messages])
    ids = [*tokenizer.encode("the cat"), 2], tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert [list(row) for row in result.token_ids] == list(ids)
    assert client.compute_loss(list(ids)).loss == result.loss


def test_batches_before_a_step_are_one(client: TrainingClient, tiny_folder: Path) -> None:
    """ForwardBackward in parts and OptimStep end where a Step of the whole ends."""
    one = Trainer.load(tiny_folder)
    one.forward_backward(IDS)
    expected = one.optim_step(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)
    for row in IDS:
        result = client.forward_backward([row])
    assert client.training_state().num_waiting_batches == 3
    done = client.optim_step(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)
    assert result.grad_norm == done.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert client.compute_loss(IDS).loss == pytest.approx(one.compute_loss(IDS).loss, rel=1e-5)
    assert client.training_state().num_waiting_batches == 0


def test_losses_and_optimizers_have_options(training: Run, tiny_folder: Path) -> None:
    """Policy losses take logprobs and advantages, sgd its momentum; options go by name."""
    with training(tiny_folder, optimizer="sgd") as target, TrainingClient(target, timeout_s=60) as client:
        sampled = client.compute_loss(IDS).logprobs
        rows = [
            TrainingRow(ids, logprobs=logprobs, advantages=[1.0] * len(ids))
            for ids, logprobs in zip(IDS, sampled, strict=True)
        ]
        ppo = client.step(rows, lr=0.01, momentum=0.9, loss="ppo", loss_options={"clip_range": 0.1})
        assert (ppo.result.name, ppo.loss) == ("ppo", pytest.approx(-1))
        assert np.sum([np.sum(row) for row in client.compute_loss(IDS).logprobs]) > np.sum(np.concatenate(sampled))
        assert client.compute_loss(IDS, loss_options={"label_smoothing": 0.1}).loss != client.compute_loss(IDS).loss
        assert client.training_state().optimizer == "sgd"


def test_a_step_is_done_whole_or_not_at_all(client: TrainingClient) -> None:
    """One whose optimizer settings are wrong leaves no gradients; one on top of others' is refused."""
    with pytest.raises(InvalidArgumentError, match=r"optimizer\.grad_clip_norm"):
        client.step(IDS, lr=0.01, grad_clip_norm=0)
    with pytest.raises(ConflictError, match="no gradients wait"):
        client.optim_step(lr=0.01)
    client.forward_backward(IDS)
    with pytest.raises(ConflictError, match="OptimStep"):
        client.step(IDS, lr=0.01)
    client.zero_gradients()
    assert client.step(IDS, lr=0.01).step == 1


def test_metrics_stream_past_and_coming_steps(client: TrainingClient) -> None:
    """First what is kept, then each step as it is done; the figures are those of the steps."""
    steps = [client.step(IDS, lr=0.01) for _ in range(2)]
    with client.stream_metrics() as stream:
        past = [next(stream), next(stream)]
        client.forward_backward(IDS[:1])
        client.forward_backward(IDS[1:])
        done = client.optim_step(lr=0.25)
        new = next(stream)
    assert [m.loss for m in past] == [pytest.approx(step.loss) for step in steps]
    assert [m.grad_norm for m in past] == [step.grad_norm for step in steps]
    assert (new.step, new.lr, new.num_tokens, new.grad_norm) == (3, 0.25, 10, done.grad_norm)
    assert min(m.tokens_per_s for m in (*past, new)) > 0
    assert [m.step for m in client.stream_metrics(2, past_only=True)] == [2, 3]


def test_the_history_of_metrics_is_bounded(training: Run, tiny_folder: Path) -> None:
    """Only the newest are kept."""
    with training(tiny_folder, max_metrics=3) as target, TrainingClient(target, timeout_s=60) as client:
        for _ in range(5):
            client.step(IDS, lr=0.01)
        assert [m.step for m in client.stream_metrics(past_only=True)] == [3, 4, 5]


def test_a_full_queue_refuses_and_dropped_calls_never_run(training: Run, tiny_folder: Path) -> None:
    """Past max_queued_calls comes RESOURCE_EXHAUSTED; a call whose deadline passes while it waits does nothing."""
    with training(tiny_folder, max_queued_calls=2) as target, TrainingClient(target, timeout_s=60) as client:
        client.synchronize()
        busy = threading.Thread(target=lambda: client.compute_loss([SLOW_ROW[:8000]]))
        busy.start()
        with TrainingClient(target, retries=0) as other:
            while not other.training_state().num_queued_calls:
                pass
            waiting = threading.Thread(target=drop, args=(target,))
            waiting.start()
            while other.training_state().num_queued_calls < 2:
                pass
            with pytest.raises(QueueFullError, match="2 calls run or wait"):
                other.compute_loss(IDS)
        waiting.join()
        busy.join()
        assert client.training_state().step == 0
        assert client.step(IDS, lr=0.01).step == 1


def drop(target: str) -> None:
    """Send a step whose time is over before it can begin."""
    with TrainingClient(target) as client:
        client.synchronize()
        with pytest.raises(DeadlineExceededError):
            client.step(IDS, lr=0.01, timeout_s=0.2)


async def test_the_asynchronous_client_does_the_same(target: str) -> None:
    """All verbs, awaited."""
    async with AsyncTrainingClient(target, timeout_s=60) as client:
        await client.wait_ready()
        before = await client.compute_loss(IDS)
        assert (await client.forward_backward(IDS)).loss == pytest.approx(before.loss)
        await client.zero_gradients()
        await client.forward_backward(IDS)
        assert (await client.optim_step(lr=0.01)).step == 1
        async with client.stream_metrics() as stream:
            assert (await anext(stream)).step == 1
            step = await client.step(["the cat", IDS[0]], lr=0.01)
            assert (await anext(stream)).loss == step.loss
        assert (await client.save_checkpoint("a")).step == 2
        assert (await client.load_checkpoint("a", with_optimizer=False)).step == 0
        assert (await client.load_checkpoint("a", with_optimizer=True)).step == 2
        with pytest.raises(ConflictError, match="no server to publish to"):
            await client.publish_weights()
        assert await client.synchronize() == (await client.training_state()).next_sequence_number
        assert [m.step async for m in client.stream_metrics(past_only=True)] == [1, 2]
