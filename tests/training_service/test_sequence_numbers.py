"""Sequence numbers: what is sent again is done once, whatever died meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from treadle_client import ConflictError, InvalidArgumentError, TrainingClient, TrainingStepResult, UnavailableError
from treadle_protos.v1 import training_pb2 as pb
from treadle_protos.v1 import training_pb2_grpc

Run = Callable[..., AbstractContextManager[str]]
IDS = [[5, 9, 2, 7, 7, 1], [3, 8, 4]]


@pytest.fixture
def stub(target: str) -> Iterator[Any]:
    """The bare stub: it numbers nothing by itself."""
    with grpc.insecure_channel(target) as channel:
        yield training_pb2_grpc.TrainingServiceStub(channel)


def step(number: int | None, lr: float = 0.01) -> pb.StepRequest:
    """Make a step with a number."""
    rows = [pb.TrainingRow(token_ids={"ids": ids}) for ids in IDS]
    settings = pb.OptimizerSettings(lr=lr)
    return pb.StepRequest(batch=pb.TrainingBatch(rows=rows), optimizer=settings, sequence_number=number)


def refused(call: Callable[[Any], Any], request: Any) -> str:
    """Return what a call is refused with, which must be FAILED_PRECONDITION."""
    with pytest.raises(grpc.RpcError) as caught:
        call(request)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    return str(caught.value.details())


def test_a_repeated_step_is_answered_and_not_done_again(stub: Any, client: TrainingClient) -> None:
    """The same number and request get the very same answer, and the weights move once."""
    first = stub.Step(step(1))
    before = client.compute_loss(IDS)
    assert stub.Step(step(1)) == first
    assert client.compute_loss(IDS) == before
    assert (client.training_state().step, client.training_state().next_sequence_number) == (1, 2)


def test_other_numbers_are_refused_and_name_the_next(stub: Any, client: TrainingClient) -> None:
    """A gap, a forgotten number, and another request under a known number."""
    stub.Step(step(1))
    for wrong in (step(3), step(0), step(1, lr=0.02), step(2**63)):
        assert "the next call has 2" in refused(stub.Step, wrong)
    assert "another request's" in refused(stub.OptimStep, pb.OptimStepRequest(optimizer={"lr": 1}, sequence_number=1))
    assert client.training_state().step == 1


def test_old_answers_are_forgotten(stub: Any) -> None:
    """Of the 64 newest the oldest is known, the one before it is not."""
    for number in range(1, 66):
        stub.ZeroGradients(pb.ZeroGradientsRequest(sequence_number=number))
    stub.ZeroGradients(pb.ZeroGradientsRequest(sequence_number=2))
    assert "not kept any more" in refused(stub.ZeroGradients, pb.ZeroGradientsRequest(sequence_number=1))


def test_what_is_refused_uses_no_number(stub: Any, client: TrainingClient) -> None:
    """A call that failed may be mended and sent with its number; calls without numbers count for nothing."""
    assert "no gradients wait" in refused(stub.OptimStep, pb.OptimStepRequest(optimizer={"lr": 1}, sequence_number=1))
    stub.Step(step(None))
    stub.Step(step(1))
    assert (client.training_state().step, client.training_state().next_sequence_number) == (2, 2)


def test_a_client_numbers_its_calls(client: TrainingClient, target: str) -> None:
    """It begins where the trainer is; where another one went on it is refused until it takes over the count."""
    client.step(IDS, lr=0.01)
    with TrainingClient(target, timeout_s=60) as other:
        other.step(IDS, lr=0.01)
        with pytest.raises(ConflictError, match="the next call has 3"):
            client.step([IDS[0]], lr=0.01)
        assert client.synchronize() == 3
        client.step(IDS, lr=0.01)
        with pytest.raises(ConflictError, match="the next call has 4"):
            other.step([IDS[1]], lr=0.01)
    assert client.training_state().step == 3


def test_the_count_comes_back_with_a_checkpoint(stub: Any, client: TrainingClient) -> None:
    """After loading with the optimizer, later calls are new again and earlier ones are remembered."""
    first = stub.Step(step(1))
    save = pb.SaveCheckpointRequest(name="a", sequence_number=2)
    saved = stub.SaveCheckpoint(save)
    assert (saved.checkpoint.step, saved.checkpoint.next_sequence_number) == (1, 3)
    second = stub.Step(step(3))
    stub.Step(step(4))
    loaded = stub.LoadCheckpoint(pb.LoadCheckpointRequest(name="a", with_optimizer=True))
    assert (loaded.step, loaded.next_sequence_number) == (1, 3)
    assert "the next call has 3" in refused(stub.Step, step(4))
    assert stub.Step(step(1)) == first
    assert stub.SaveCheckpoint(save) == saved
    assert stub.Step(step(3)) == second
    assert client.training_state().step == 2


def test_weights_alone_leave_the_count(stub: Any, client: TrainingClient) -> None:
    """Loading them is a call like any other; with the optimizer it has no number."""
    stub.SaveCheckpoint(pb.SaveCheckpointRequest(name="a", sequence_number=1))
    load = pb.LoadCheckpointRequest(name="a", sequence_number=2)
    assert stub.LoadCheckpoint(load).next_sequence_number == 3
    stub.Step(step(3))
    assert stub.LoadCheckpoint(load).next_sequence_number == 3
    assert client.training_state().step == 1
    with pytest.raises(grpc.RpcError, match="must be unset with with_optimizer"):
        stub.LoadCheckpoint(pb.LoadCheckpointRequest(name="a", with_optimizer=True, sequence_number=4))


def test_a_retry_after_a_crash_is_done_once_or_refused(training: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """What a client sends again meets the count of the checkpoint that the new trainer went on from."""
    root = tmp_path / "root"
    with training(tiny_folder, checkpoint_root=root) as target, grpc.insecure_channel(target) as channel:
        stub = training_pb2_grpc.TrainingServiceStub(channel)
        stub.SaveCheckpoint(pb.SaveCheckpointRequest(name="begin", sequence_number=1))
        answer = stub.Step(step(2))
        stub.SaveCheckpoint(pb.SaveCheckpointRequest(name="done", sequence_number=3))
    for resume, following in (("done", 4), ("begin", 2)):
        with (
            training(tiny_folder, checkpoint_root=root, resume=resume) as target,
            grpc.insecure_channel(target) as channel,
        ):
            stub = training_pb2_grpc.TrainingServiceStub(channel)
            assert f"the next call has {following}" in refused(stub.Step, step(5))
            assert stub.Step(step(2)) == answer  # remembered, or done for the first time in this life
            state = stub.GetTrainingState(pb.GetTrainingStateRequest())
            assert (state.step, state.next_sequence_number) == (1, max(following, 3))
    with training(tiny_folder, checkpoint_root=root) as target, grpc.insecure_channel(target) as channel:
        stub = training_pb2_grpc.TrainingServiceStub(channel)
        assert "the next call has 1" in refused(stub.Step, step(2))  # a trainer that knows of nothing


def test_the_client_retries_what_reached_nobody(training: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """A call to a trainer that is gone is sent again with its number, and after it came back is done once."""
    with training(tiny_folder, checkpoint_root=tmp_path) as target, TrainingClient(target, retries=1) as client:
        client.step(IDS, lr=0.01)
        client.save_checkpoint("a")
        port = int(target.rpartition(":")[2])
        with pytest.raises(InvalidArgumentError):
            client.step([[300]], lr=0.01)
        expected = client.step(IDS, lr=0.01)
    with TrainingClient(target, retries=0) as client:
        client._next_number = 3
        with pytest.raises(UnavailableError):
            client.step(IDS, lr=0.01)
        with training(tiny_folder, checkpoint_root=tmp_path, resume="a", port=port):
            client.wait_ready(10)
            assert client.step(IDS, lr=0.01) == expected
            client._next_number = 3
            assert client.step(IDS, lr=0.01) == expected
            assert client.training_state().step == 2


def test_a_call_outlives_a_trainer_that_comes_back(training: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """It waits for the trainer as long as its retries reach, and is then done once."""
    answers: list[TrainingStepResult] = []
    with training(tiny_folder, checkpoint_root=tmp_path) as target, TrainingClient(target) as client:
        client.save_checkpoint("a")
    with TrainingClient(target, retries=20, timeout_s=60) as client:
        client._next_number = 2
        waiting = threading.Thread(target=lambda: answers.append(client.step(IDS, lr=0.01)))
        waiting.start()
        time.sleep(0.3)  # it meets nobody at first
        with training(tiny_folder, checkpoint_root=tmp_path, resume="a", port=int(target.rpartition(":")[2])):
            waiting.join()
            assert answers[0].step == client.training_state().step == 1
