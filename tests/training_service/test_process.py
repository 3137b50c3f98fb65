"""`treadle trainer` and `treadle serve --with-trainer` as processes: announced, drained, and apart from each other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from treadle_client import (
    Client,
    ConflictError,
    TrainingClient,
    TreadleClientError,
    UnauthenticatedError,
    UnavailableError,
)

Run = Callable[..., AbstractContextManager[Any]]
IDS = [[5, 9, 2, 7, 7, 1]]
SERVICE = "treadle_protos.v1.TrainingService"


def health_of(address: str, service: str) -> int:
    """Return the health of a service at an address."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status)


def test_it_says_what_it_is(process: Run, tiny_folder: Path) -> None:
    """Health and reflection know the service."""
    with process("trainer", tiny_folder) as (_, told):
        assert told["model"] == str(tiny_folder)
        assert health_of(told["address"], SERVICE) == health_of(told["address"], "") == 1
        with grpc.insecure_channel(told["address"]) as channel:
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            listed = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=10)
            assert SERVICE in {service.name for service in next(listed).list_services_response.service}


def test_its_log_has_the_figures_and_the_steps_that_nothing_kept(
    process: Run, tiny_folder: Path, tmp_path: Path
) -> None:
    """A line of each training call says what came of it; at the end one names the steps after the last save."""
    options = ("--checkpoint-root", tmp_path, "--log-format", "json")
    with (
        process("trainer", tiny_folder, *options) as (started, told),
        TrainingClient(told["address"], retries=0, timeout_s=30) as client,
    ):
        done = client.step(IDS, lr=0.01)
        client.save_checkpoint("a")
        client.compute_loss(IDS)
        client.forward_backward(IDS)
        client.optim_step(lr=0.5)
        client.step(IDS, lr=0.01)
        started.terminate()
        lines = [json.loads(line) for line in started.communicate()[1].decode().splitlines()]
    calls = {line["method"].partition("/")[2]: line for line in reversed(lines) if "method" in line}
    figures = ("step", "loss", "grad_norm", "lr", "num_tokens")
    step = [calls["Step"].get(name) for name in figures]
    assert step == [1, done.loss, done.grad_norm, 0.01, done.result.num_tokens]
    has = {name: {figure for figure in figures if figure in calls[name]} for name in calls}
    assert has["ComputeLoss"] == {"loss", "num_tokens"}
    assert has["ForwardBackward"] == {"loss", "num_tokens", "grad_norm"}
    assert has["OptimStep"] == {"step", "grad_norm", "lr"}
    assert calls["Step"]["message"] == "TrainingService/Step OK"
    warnings = [line["message"] for line in lines if line["level"] == "warning"]
    assert warnings == ["steps 2-3 were kept nowhere"]


def test_a_signal_drains_it(process: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Streams of metrics end, later calls are refused, and the process exits with 0."""
    with (
        process("trainer", tiny_folder, "--checkpoint-root", tmp_path) as (started, told),
        TrainingClient(told["address"], retries=0, timeout_s=30) as client,
    ):
        client.step(IDS, lr=0.01)
        stream = client.stream_metrics()
        assert next(stream).step == 1
        started.terminate()
        assert list(stream) == []
        assert started.wait(10) == 0
        with pytest.raises(UnavailableError):
            client.step(IDS, lr=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume", "a"], ["resume needs a checkpoint root"]),
        (["--server", "127.0.0.1:1"], ["publish root"]),
        (["--server", "example.org:1", "--server-token-file", "{token}"], ["example.org:1", "plain text"]),
        (["--dtype", "float16"], ["dtype", "float16"]),
        (["--optimizer", "newton"], ["optimizer", "newton"]),
        (["--frozen", "nothing*"], ["frozen", "nothing*"]),
        (["--lora-rank", "0"], ["lora.rank"]),
        (["--host", "0.0.0.0"], ["plain text"]),
        (["--checkpoint-root", "{tmp}", "--resume", "a"], ["no checkpoint 'a'"]),
    ],
)
def test_wrong_settings_are_named(tiny_folder: Path, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    """It exits with 1 and one line."""
    token = tmp_path / "token"
    token.write_text("secret")
    given = [argument.replace("{tmp}", str(tmp_path)).replace("{token}", str(token)) for argument in arguments]
    command = [sys.executable, "-m", "treadle_server.cli", "trainer", str(tiny_folder), "--port", "0", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, [word for word in words if word not in last]) == (1, [])
    assert "secret" not in done.stderr


def test_quantised_weights_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """Training needs float weights; the message says so before anything listens for calls."""
    folder = tmp_path / "quantised"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    command = [sys.executable, "-m", "treadle_server.cli", "trainer", str(folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "quanti" in done.stderr.splitlines()[-1]


def test_a_server_starts_its_trainer(process: Run, tiny_folder: Path) -> None:
    """It publishes there, and ends with it."""
    with (
        process("serve", f"tiny={tiny_folder}", "--with-trainer", "--trainer-port", "0") as (started, told),
        TrainingClient(told["trainer"], timeout_s=30) as trainer,
        Client(told["address"], timeout_s=30) as client,
    ):
        trainer.step(IDS, lr=0.01)
        assert trainer.publish_weights().weight_version == 2
        assert client.get_model("tiny").weight_version == 2
        assert health_of(told["address"], SERVICE) == 1
        started.terminate()
        assert started.wait(20) == 0
        with pytest.raises(TreadleClientError):
            trainer.training_state(timeout_s=2)


def test_the_servers_roots_keep_what_its_trainer_published(process: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Under the first of them, and options go on to the trainer."""
    options = ["--model-root", tmp_path, "--trainer-port", "0", "--trainer-option=--lora-rank=2"]
    with (
        process("serve", f"tiny={tiny_folder}", "--with-trainer", *options) as (_, told),
        TrainingClient(told["trainer"], timeout_s=30) as trainer,
    ):
        assert trainer.training_state().lora_rank == 2
        trainer.publish_weights()
    assert len(list((tmp_path / "published-tiny").iterdir())) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="finds the child in /proc")
def test_a_dead_trainer_hurts_nobody(process: Run, tiny_folder: Path) -> None:
    """Its end is logged and told to health checks; the server serves on."""
    with (
        process("serve", f"tiny={tiny_folder}", "--with-trainer", "--trainer-port", "0") as (started, told),
        Client(told["address"], timeout_s=30) as client,
    ):
        os.kill(child_of(started.pid), signal.SIGKILL)
        assert started.stderr is not None
        while b"the trainer ended with status -9" not in started.stderr.readline():
            pass
        while health_of(told["address"], SERVICE) == 1:
            time.sleep(0.01)
        assert client.generate([1, 2, 3], max_tokens=2).choices[0].finish.reason == "max_tokens"
        started.terminate()
        assert started.wait(20) == 0


def test_a_trainer_never_outlives_its_server(process: Run, tiny_folder: Path) -> None:
    """Not even when the server is killed."""
    with (
        process("serve", f"tiny={tiny_folder}", "--with-trainer", "--trainer-port", "0") as (started, told),
        TrainingClient(told["trainer"], timeout_s=30, retries=0) as trainer,
    ):
        trainer.step(IDS, lr=0.01)
        started.kill()
        started.wait(10)
        with pytest.raises(TreadleClientError):
            ask_for_ever(trainer)


def ask_for_ever(client: TrainingClient) -> None:
    """Ask a trainer for its state until it does not answer."""
    while True:
        client.training_state(timeout_s=5)
        time.sleep(0.01)


def child_of(pid: int) -> int:
    """Return the process that another one started."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--trainer-port", "0"], "--with-trainer"),
        (["again={tiny}", "--with-trainer"], "only model"),
        (["--with-trainer", "--token-file", "{tokens}"], "TREADLE_TOKEN, or its file into --trainer-option"),
        (["--with-trainer", "--tls-cert", "{tokens}", "--tls-key", "{tokens}"], "--server-tls-ca FILE --publish-root"),
        (["--model-root", "{tokens}/nowhere"], "is not a folder"),
        (["--port", "99999"], "╯"),
        (["--with-trainer", "--trainer-option=--dtype=int8", "--trainer-port", "0"], "did not start"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], word: str
) -> None:
    """With one line that says why, after the trainer's own where it is the trainer's."""
    monkeypatch.delenv("TREADLE_TOKEN", raising=False)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"admin {'a' * 32}\n")
    tokens.chmod(0o600)
    given = [argument.replace("{tiny}", str(tiny_folder)).replace("{tokens}", str(tokens)) for argument in arguments]
    command = [sys.executable, "-m", "treadle_server.cli", "serve", f"tiny={tiny_folder}", "--port", "0", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert word in done.stderr.splitlines()[-1]


def test_a_trainer_beside_a_server_has_its_tokens(
    process: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks its callers for the same ones, and publishes with the one in the environment."""
    file = tmp_path / "tokens"
    file.write_text(f"admin {'a' * 32}\n")
    file.chmod(0o600)
    monkeypatch.setenv("TREADLE_TOKEN", "a" * 32)
    options = ["--with-trainer", "--trainer-port", "0", "--token-file", file]
    with process("serve", f"tiny={tiny_folder}", *options) as (_, told):
        with TrainingClient(told["trainer"], timeout_s=30, token="a" * 32) as trainer:
            assert trainer.publish_weights().weight_version == 2
        with TrainingClient(told["trainer"], timeout_s=30) as nobody, pytest.raises(UnauthenticatedError):
            nobody.training_state()


def test_training_calls_need_an_administrator(training: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """Where the trainer has tokens, a user's does not do."""
    file = tmp_path / "tokens"
    file.write_text(f"user {'u' * 32}\nadmin {'a' * 32}\n")
    file.chmod(0o600)
    with (
        training(tiny_folder, token_file=file) as target,
        TrainingClient(target, token="u" * 32, timeout_s=30) as client,
    ):
        with pytest.raises(TreadleClientError, match="admin"):
            client.training_state()
        with TrainingClient(target, token="a" * 32) as administrator, pytest.raises(ConflictError):
            administrator.optim_step(lr=0.1)
