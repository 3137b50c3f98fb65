"""Tokens, roles and limits a client, on a real server process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import Default
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from treadle_client import Client, PermissionDeniedError, QueueFullError, UnauthenticatedError
from treadle_server.service.app import SERVICES
from treadle_server.service.security.permissions import Role, role_needed

ADMIN = "admin-token-0123456789abcdef"
USER = "user-token-0123456789abcdef"
OTHER = "other-token-0123456789abcdef"
TOKENS = f"# who may do what\nalice admin {ADMIN}\n\nbob user {USER}\nuser {OTHER}\n"
CODE = grpc.StatusCode
REFUSED = {CODE.UNAUTHENTICATED, CODE.PERMISSION_DENIED}


@pytest.fixture
def token_file(tmp_path: Path, replace_file: Any) -> Path:
    """A file with an administrator and two users."""
    path: Path = replace_file(tmp_path / "tokens", TOKENS)
    return path


def all_methods() -> list[str]:
    """Return the full name of every RPC that the server has, health and reflection aside."""
    services = (Default().FindServiceByName(name) for name in SERVICES)
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


def code_of(channel: grpc.Channel, method: str, *headers: str) -> grpc.StatusCode:
    """Call an RPC with an empty message, and return the status."""
    call = channel.unary_stream(method)(b"", metadata=[("authorization", header) for header in headers], timeout=20)
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass
    code: grpc.StatusCode = call.code()
    return code


@pytest.fixture(scope="module")
def channel(serve: Any, replace_file: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[grpc.Channel]:
    """A connection to a server with tokens."""
    token_file = replace_file(tmp_path_factory.mktemp("tokens") / "tokens", TOKENS)
    with serve("--token-file", token_file) as server, grpc.insecure_channel(server.target) as made:
        yield made


def test_every_rpc_asks_for_a_token_and_its_role(channel: grpc.Channel) -> None:
    """Without a token no RPC answers; with a user's those of administrators do not; with an administrator's all do."""
    for method in all_methods():
        is_admin = role_needed(method) is Role.ADMIN
        assert code_of(channel, method) is CODE.UNAUTHENTICATED, method
        assert code_of(channel, method, "Bearer wrong-token-0123456789") is CODE.UNAUTHENTICATED, method
        assert (code_of(channel, method, f"Bearer {USER}") is CODE.PERMISSION_DENIED) == is_admin, method
        assert code_of(channel, method, f"Bearer {ADMIN}") not in REFUSED, method


LIST = "/treadle_protos.v1.ModelService/ListModels"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([f"bearer {USER}"], CODE.OK),
        ([f"BEARER  {OTHER}"], CODE.OK),
        ([USER], CODE.UNAUTHENTICATED),
        ([f"Basic {USER}"], CODE.UNAUTHENTICATED),
        ([f"Bearer {USER} {USER}"], CODE.UNAUTHENTICATED),
        ([f"Bearer {USER}", f"Bearer {USER}"], CODE.UNAUTHENTICATED),
        (["Bearer "], CODE.UNAUTHENTICATED),
        ([f"Bearer {USER}x"], CODE.UNAUTHENTICATED),
        ([f"Bearer {USER[:-1]}"], CODE.UNAUTHENTICATED),
    ],
)
def test_header_is_taken_as_it_should_be_only(channel: grpc.Channel, headers: list[str], code: grpc.StatusCode) -> None:
    """One header with the scheme Bearer, in any case of letters, and a whole token."""
    assert code_of(channel, LIST, *headers) is code


def test_health_is_open_and_reflection_is_not(channel: grpc.Channel) -> None:
    """A probe needs no token; whoever wants to know what the server has does."""
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        ProtoReflectionDescriptorDatabase(channel).get_services()
    assert caught.value.code() is CODE.UNAUTHENTICATED
    assert code_of(channel, "/treadle_protos.v1.ModelService/NoSuchMethod") is CODE.UNIMPLEMENTED


def test_a_message_is_read_after_the_token_only(channel: grpc.Channel) -> None:
    """Without a token megabytes are refused at once; so is a message that could not even be parsed."""
    call = channel.unary_unary("/treadle_protos.v1.GenerationService/Tokenize")
    for message in (b"\x00" * (15 << 20), b"\xff"):
        with pytest.raises(grpc.RpcError) as caught:
            call(message, timeout=20)
        assert caught.value.code() is CODE.UNAUTHENTICATED


def test_a_trainer_is_for_administrators(serve: Any, token_file: Path) -> None:
    """A trainer has the same tokens; a user may not even look at its state. Its health is as open."""
    state = "/treadle_protos.v1.TrainingService/GetTrainingState"
    flags = ["--token-file", token_file]
    with serve(*flags, command="trainer") as server, grpc.insecure_channel(server.target) as channel:
        codes = [code_of(channel, state, *headers) for headers in ((), (f"Bearer {USER}",), (f"Bearer {ADMIN}",))]
        assert code_of(channel, "/grpc.health.v1.Health/Check") is CODE.OK
    assert codes == [CODE.UNAUTHENTICATED, CODE.PERMISSION_DENIED, CODE.OK]


def test_client_errors_tell_the_two_cases_apart(serve: Any, token_file: Path) -> None:
    """The client raises UnauthenticatedError without a token; the answer says what is needed."""
    with serve("--token-file", token_file) as server:
        with Client(server.target) as client, pytest.raises(UnauthenticatedError, match="a token is needed"):
            client.list_models()
        with Client(server.target, token=USER) as client:
            assert client.list_models()
            with pytest.raises(PermissionDeniedError, match="bob has the role user"):
                client.unload_model("tiny")


def accepts(channel: grpc.Channel, token: str) -> bool:
    """Tell whether the server takes a token."""
    return code_of(channel, LIST, f"Bearer {token}") is CODE.OK


def eventually(call: Callable[[], bool]) -> None:
    """Wait until a call returns true: the file is looked at once a second."""
    end_s = time.monotonic() + 10
    while not call():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_tokens_change_while_serving(serve: Any, token_file: Path, replace_file: Any) -> None:
    """A new file is taken within a second or at SIGHUP; a broken one changes nothing, and the log says why."""
    with serve("--token-file", token_file) as server, grpc.insecure_channel(server.target) as channel:
        assert accepts(channel, USER)
        replace_file(token_file, f"carol user {USER[::-1]}\n")
        eventually(lambda: accepts(channel, USER[::-1]))
        assert not accepts(channel, USER)
        replace_file(token_file, f"carol boss {ADMIN}\n")
        eventually(lambda: accepts(channel, USER[::-1]) and "names no role" in server.log())
        assert not accepts(channel, ADMIN)
        token_file.unlink()
        eventually(lambda: accepts(channel, USER[::-1]) and "No such file" in server.log())
        replace_file(token_file, TOKENS)
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "read 3 tokens" in server.log())
        assert accepts(channel, ADMIN)
        assert server.process.poll() is None


def test_one_client_cannot_take_every_place(serve: Any, token_file: Path, slow_plugins: Path) -> None:
    """A client with as many requests as it may have gets RESOURCE_EXHAUSTED and a time to wait; others are served."""
    flags = ["--token-file", token_file, "--max-requests-per-client", "2", "--plugin-dir", slow_plugins]
    with (
        serve(*flags) as server,
        Client(server.target, token=USER, retries=0) as bob,
        Client(server.target, token=ADMIN, retries=0) as alice,
    ):
        slow: dict[str, Any] = {"stages": ["slow"], "ignore_eos": True, "max_tokens": 100}
        with bob.stream([5], **slow) as first, bob.stream([6], **slow) as second:
            next(iter(first))
            next(iter(second))
            with pytest.raises(QueueFullError, match="the client bob has 2 requests under way") as caught:
                bob.generate([7], max_tokens=1)
            assert caught.value.retry_after_s == 1
            assert alice.generate([7], max_tokens=1).choices
        eventually(lambda: _answers(bob))


def _answers(client: Client) -> bool:
    try:
        client.generate([7], max_tokens=1)
    except QueueFullError:
        return False
    return True
