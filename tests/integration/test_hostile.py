"""What a hostile client or plugin may try. Each case was a fault once; the server must serve on after all of them."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc._cython import cygrpc
from treadle_client import Client, InvalidArgumentError, NotFoundError, ServerInternalError
from treadle_protos.v1 import generation_pb2, generation_pb2_grpc, model_pb2, sampler_pb2, server_pb2, trace_pb2
from treadle_server.config import ServerConfig
from treadle_server.service.app import channel_options
from treadle_server.service.embedded import embedded_server
from treadle_server.service.status import cut

PLUGIN = '''
import asyncio
from treadle_plugin_api import Stage, hookimpl

KINDS = {
    "interrupt": KeyboardInterrupt,
    "generator": GeneratorExit,
    "cancelled": asyncio.CancelledError,
    "exit": SystemExit,
}


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Evil(Stage):
    """Raises what is no Exception, wherever it is told to."""

    name = "evil"
    kind = "transform"

    where: str = "apply"
    what: str = "interrupt"

    def fail(self, where):
        if where == self.where:
            if self.what == "unprintable":
                raise Unprintable
            raise KINDS.get(self.what, RuntimeError)("\\ud800" + "\\u732b" * 9000)

    def check(self, model_info):
        self.fail("check")

    def start(self, context):
        self.fail("start")

    def apply(self, logits, context, state=None):
        self.fail("apply")
        return logits

    def accept(self, state, token_id):
        self.fail("accept")


@hookimpl
def treadle_register_stages(register):
    register(Evil)
'''


@pytest.fixture(scope="module")
def hostile_target(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the evil plugin."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "evil.py").write_text(PLUGIN)
    config = ServerConfig(port=0, plugin_dirs=(folder,), grace_s=0)
    with embedded_server([f"tiny={tiny_folder}"], config) as target:
        yield target


@pytest.fixture(scope="module")
def hostile(hostile_target: str) -> Iterator[Client]:
    """A client of that server."""
    with Client(hostile_target, timeout_s=20, retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def serves_on(hostile: Client) -> Iterator[None]:
    """After every case the server still answers, and at once."""
    yield
    start = time.monotonic()
    assert hostile.generate([5], max_tokens=1, ignore_eos=True).choices[0].finish.reason == "max_tokens"
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("what", ["interrupt", "generator", "cancelled", "exit", "unprintable", "long"])
@pytest.mark.parametrize("where", ["check", "start", "apply", "accept"])
def test_stage_may_raise_anything_anywhere(hostile: Client, where: str, what: str) -> None:
    """Even what is no Exception fails its own request alone, and the message names the stage."""
    with pytest.raises(ServerInternalError, match="'evil' of plugin 'evil'"):
        hostile.generate([5], stages=[("evil", {"where": where, "what": what})], max_tokens=2)


def test_long_orders_and_chains_are_refused_at_once(hostile: Client) -> None:
    """A list that would cost everyone time is refused by its length."""
    with pytest.raises(InvalidArgumentError, match="at most 64 entries"):
        hostile.generate([5], order=["greedy"] * 100_000)
    with pytest.raises(InvalidArgumentError, match="at most 64 entries"):
        hostile.generate([5], stages=["top_k"] * 10_000)


def test_errors_fit_in_the_headers(hostile: Client) -> None:
    """However long a name was sent, the answer is the error itself and not a complaint about its size."""
    with pytest.raises(NotFoundError):
        hostile.generate([5], model="猫" * 10_000)
    with pytest.raises(InvalidArgumentError):
        hostile.generate([5], preset="猫" * 5000)
    with pytest.raises(InvalidArgumentError):
        hostile.generate([5], stages=[("top_k", {"猫" * 3000: 1})])
    with pytest.raises(InvalidArgumentError):
        hostile.generate([5], stop=[""] * 60, stop_token_ids=[10**6] * 60, max_tokens=0, n=0)


def test_answer_that_could_not_be_sent_is_refused_before_the_work(hostile: Client) -> None:
    """Log-probabilities beyond the message limit are refused with their size; a stream may have them."""
    wanted = {"logprobs": "raw", "top_logprobs": 128, "max_tokens": 60, "n": 128}
    with pytest.raises(InvalidArgumentError, match="can make an answer of"):
        hostile.generate([5], **wanted)
    with hostile.stream([5], **{**wanted, "n": 1}) as stream:
        assert list(stream)


def test_detokenize_is_limited(hostile: Client) -> None:
    """A list of ids far beyond the context is refused by its length."""
    with pytest.raises(InvalidArgumentError, match="entries, got 1000000"):
        hostile.detokenize([5] * 1_000_000)


def test_every_channel_option_is_known_to_grpc() -> None:
    """An option whose name is wrong is ignored, so each name must stand in gRPC's library."""
    library = Path(cygrpc.__file__).read_bytes()
    for name, _ in channel_options(ServerConfig()):
        assert name.encode() in library, name


def test_cut_texts_are_valid_and_short() -> None:
    """A cut keeps whole characters and replaces what is no Unicode."""
    assert cut("猫" * 10, 7) == "猫猫..."
    assert cut("\ud800a", 10) == "?a"


@pytest.mark.soak
def test_keepalive_pings_are_welcome_through_a_long_silence(tiny_folder: Path, tmp_path: Path) -> None:
    """A call that is silent for longer than many pings is not cut off as abuse."""
    (tmp_path / "slow.py").write_text(
        re.sub(r"self\.fail\(\"apply\"\)", "__import__('time').sleep(100)", PLUGIN).replace('"evil"', '"slow"')
    )
    config = ServerConfig(port=0, plugin_dirs=(tmp_path,), grace_s=0)
    with embedded_server([f"tiny={tiny_folder}"], config) as target:
        options = [("grpc.keepalive_time_ms", 11_000), ("grpc.http2.max_pings_without_data", 0)]
        with grpc.insecure_channel(target, options=options) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            spec = generation_pb2.GenerationSpec(text="a", stopping=generation_pb2.StoppingOptions(max_tokens=1))
            spec.sampling.stages.add(name="slow")
            assert stub.Generate(generation_pb2.GenerateRequest(spec=spec)).choices


METHODS = [
    method
    for module in (generation_pb2, model_pb2, sampler_pb2, server_pb2, trace_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_random_bytes_get_a_proper_status(hostile_target: str, method: MethodDescriptor) -> None:
    """Whatever bytes an RPC gets, its status is never INTERNAL or UNKNOWN."""
    source = random.Random(method.name)
    path = f"/{method.containing_service.full_name}/{method.name}"
    with grpc.insecure_channel(hostile_target) as channel:
        call = channel.unary_stream(path) if method.server_streaming else channel.unary_unary(path)
        codes = {_status_of(call, source.randbytes(source.randrange(40))) for _ in range(40)}
    assert not codes & {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}


def _status_of(call: Callable[..., object], raw: bytes) -> grpc.StatusCode:
    try:
        answer = call(raw, timeout=20)
        if isinstance(answer, Iterator):
            list(answer)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK
