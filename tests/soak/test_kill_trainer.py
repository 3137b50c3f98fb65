"""SIGKILL of a trainer at random moments: it goes on from its last checkpoint as if nothing had been.

The same calls with the same sequence numbers go to a trainer that is never killed and to one that is again and again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.numpy import load_file
from treadle_client import Client
from treadle_protos.v1 import training_pb2 as pb
from treadle_protos.v1 import training_pb2_grpc
from treadle_server.checkpoints.loading import load_checkpoint

SCORED = [5, 90, 41, 17, 8]
CHECKPOINT = "last"


def program(num_rounds: int) -> list[tuple[str, Any]]:
    """Return the numbered calls: in each round gradients and a step, two whole steps, weights published, all saved."""
    calls: list[tuple[str, Any]] = []
    for number in range(num_rounds):
        calls.append(("ForwardBackward", pb.ForwardBackwardRequest(batch=batch(number))))
        calls.append(("OptimStep", pb.OptimStepRequest(optimizer=pb.OptimizerSettings(lr=0.01))))
        for extra in (1, 2):
            settings = pb.OptimizerSettings(lr=0.01, weight_decay=0.1)
            calls.append(("Step", pb.StepRequest(batch=batch(number + 100 * extra), optimizer=settings)))
        calls.append(("PublishWeights", pb.PublishWeightsRequest(label=f"round {number}")))
        calls.append(("SaveCheckpoint", pb.SaveCheckpointRequest(name=CHECKPOINT)))
    for number, (_, request) in enumerate(calls):
        request.sequence_number = number + 1
    return calls


def batch(seed: int) -> pb.TrainingBatch:
    """Return three rows of tokens, the same for a seed every time."""
    source = random.Random(seed)
    lengths = [source.randrange(4, 30) for _ in range(3)]
    rows = [pb.TrainingRow(token_ids={"ids": [source.randrange(3, 250) for _ in range(n)]}) for n in lengths]
    return pb.TrainingBatch(rows=rows)


@dataclass
class Run:
    """A trainer that is started as often as it dies, and the answers that its calls got."""

    start: Callable[[], Any]
    server: Client
    root: Path
    answers: dict[int, Any] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    num_lives: int = 0
    lived_s: float = 0.0  # how long the calls of the last life took
    num_repeated: int = 0

    def go(self, calls: list[tuple[str, Any]], delays_s: Iterator[float]) -> pb.ComputeLossResponse:
        """Make all calls, in as many lives as there are delays and one more; return the last loss."""
        while True:
            delay_s = next(delays_s, None)
            with self.start() as running, grpc.insecure_channel(running.address) as channel:
                self.num_lives += 1
                killer = threading.Timer(delay_s or 0.0, running.process.kill)
                if delay_s is not None:
                    killer.start()
                begun_s = time.monotonic()
                try:
                    return self._live(training_pb2_grpc.TrainingServiceStub(channel), calls)
                except grpc.RpcError as error:
                    if delay_s is None or error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                finally:
                    self.lived_s = time.monotonic() - begun_s
                    killer.cancel()
                    running.kill()
                    assert not running.faults()

    def _live(self, stub: Any, calls: list[tuple[str, Any]]) -> pb.ComputeLossResponse:
        """Send the newest call that the checkpoint knows once more, then all that follow."""
        assert not {p.suffix for p in (self.root / "checkpoints").iterdir()} & {".partial", ".previous"}
        state = stub.GetTrainingState(pb.GetTrainingStateRequest())
        following = state.next_sequence_number
        if following > 1:
            assert self._call(stub, calls, following - 1).checkpoint.step == state.step
            assert stub.GetTrainingState(pb.GetTrainingStateRequest()).step == state.step
        for number in range(following, len(calls) + 1):
            self._call(stub, calls, number)
        return stub.ComputeLoss(pb.ComputeLossRequest(batch=batch(0)))

    def _call(self, stub: Any, calls: list[tuple[str, Any]], number: int) -> Any:
        """Make a call; what it answers is the same in every life."""
        name, request = calls[number - 1]
        answer = getattr(stub, name)(request)
        self.num_repeated += number in self.answers
        if name == "PublishWeights":
            score = self.server.score(SCORED).total_logprob
            assert score == self.scores.setdefault(request.label, score)
            answer.publication.weight_version = 0  # counts what the server was given, in all lives
        assert answer == self.answers.setdefault(number, answer)
        return answer

    def check_files(self) -> None:
        """Every folder but those that say that they are being written is whole."""
        for folder in [*(self.root / "checkpoints").iterdir(), *(self.root / "published").iterdir()]:
            if folder.suffix != ".partial":
                load_checkpoint(folder).close()
                for file in folder.glob("*.safetensors"):
                    load_file(file)


@pytest.mark.counts(default=2, full=80)
def test_a_killed_trainer_goes_on_bit_for_bit(
    spawn: Callable[..., Any], tiny_folder: Path, tmp_path: Path, figure: Callable[[str], None], count: int
) -> None:
    """Answers, published weights and the end are those of a trainer that was never killed; no call is done twice."""
    calls = program(2 + count)
    with (
        spawn("serve", f"tiny={tiny_folder}", "--port", "0", "--model-root", tmp_path) as server,
        Client(server.address, timeout_s=60) as client,
    ):
        roots = [tmp_path / "whole", tmp_path / "killed"]
        whole, killed = (Run(starting(spawn, tiny_folder, root, server.address), client, root) for root in roots)
        expected = whole.go(calls, iter(()))
        longest_s = min(whole.lived_s / 2, 0.5)  # the first life at least is cut short
        source = random.Random(count)
        assert killed.go(calls, checked((source.uniform(0.0, longest_s) for _ in range(count)), killed)) == expected
    assert killed.num_lives > 1
    assert (killed.answers, killed.scores) == (whole.answers, whole.scores)
    same_numbers(*(root / "checkpoints" / CHECKPOINT for root in roots))
    figure(
        f"trainer killed {killed.num_lives - 1} times: {len(calls)} calls, of which {killed.num_repeated} were done or "
        f"answered again; answers, published weights and the end as of one that lived"
    )


def checked(delays_s: Iterator[float], run: Run) -> Iterator[float]:
    """Look at the files of a run before each life but the first."""
    for number, delay_s in enumerate(delays_s):
        if number:
            run.check_files()
        yield delay_s


def starting(spawn: Callable[..., Any], model: Path, root: Path, server: str) -> Callable[[], Any]:
    """Return what starts a trainer, from its checkpoint if it has one."""
    options = ["--checkpoint-root", root / "checkpoints", "--publish-root", root / "published", "--server", server]
    root.mkdir()
    (root / "published").mkdir()

    def start() -> Any:
        saved = [*(root / "checkpoints").glob(f"{CHECKPOINT}*")] if (root / "checkpoints").is_dir() else []
        resume = ["--resume", CHECKPOINT] if any(path.suffix != ".partial" for path in saved) else []
        return spawn("trainer", model, "--port", "0", "--grace", "0", *options, *resume)

    return start


def same_numbers(one: Path, other: Path) -> None:
    """Check that the weights and the optimizer's state of two folders are the same bytes."""
    assert {p.name: p.read_bytes() for p in one.glob("*.safetensors")} == {
        p.name: p.read_bytes() for p in other.glob("*.safetensors")
    }
