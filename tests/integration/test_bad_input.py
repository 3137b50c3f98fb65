"""Whatever a client sends, that request fails with the right status and the server serves on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from treadle_client import (
    Client,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    QueueFullError,
    ServerInternalError,
)
from treadle_protos.v1 import generation_pb2 as pb
from treadle_protos.v1 import generation_pb2_grpc, value_pb2
from treadle_server.config import ServerConfig
from treadle_server.service.embedded import embedded_server


@pytest.fixture
def channel(target: str) -> Iterator[grpc.Channel]:
    """A bare channel, for what the client would not send."""
    with grpc.insecure_channel(target, options=[("grpc.max_send_message_length", 64 << 20)]) as made:
        yield made


@pytest.fixture(autouse=True)
def serves_on(client: Client) -> Iterator[None]:
    """After every case the server still answers."""
    yield
    assert client.generate([5, 6], model="tiny", max_tokens=2, ignore_eos=True).choices[0].finish.reason == "max_tokens"


def spec(**fields: object) -> pb.GenerationSpec:
    """Make a spec for the tiny model with two prompt tokens, unless given otherwise."""
    made = pb.GenerationSpec(model="tiny", **fields)
    if made.WhichOneof("prompt") is None:
        made.token_ids.ids.extend([5, 6])
    return made


NAN, INF = float("nan"), float("inf")
STAGE = pb.Stage(name="top_k", parameters={"top_k": value_pb2.Value(double_value=3.0)})
DEEP = value_pb2.Value(int_value=1)
for _ in range(40):
    DEEP = value_pb2.Value(list_value=value_pb2.ValueList(values=[DEEP]))

WRONG = {
    "no model": (pb.GenerationSpec(text="a"), "model", "overflowing, tiny"),
    "no prompt": (pb.GenerationSpec(model="tiny"), "prompt", "must be set"),
    "id outside": (spec(token_ids=pb.TokenIds(ids=[4000])), "token_ids[0]", "4000"),
    "too long": (spec(token_ids=pb.TokenIds(ids=[5] * 500)), "token_ids", "has 500 tokens"),
    "no messages": (spec(messages=pb.Messages()), "messages", "at least one message"),
    "temperature nan": (spec(sampling=pb.SamplingOptions(temperature=NAN)), "sampling.temperature", "nan"),
    "temperature inf": (spec(sampling=pb.SamplingOptions(temperature=INF)), "sampling.temperature", "inf"),
    "top_p 0": (spec(sampling=pb.SamplingOptions(top_p=0)), "sampling.top_p", "0.0"),
    "top_k huge": (spec(sampling=pb.SamplingOptions(top_k=2**62)), "sampling.top_k", str(2**62)),
    "max_tokens 0": (spec(stopping=pb.StoppingOptions(max_tokens=0)), "stopping.max_tokens", "got 0"),
    "min_tokens -1": (spec(stopping=pb.StoppingOptions(min_tokens=-1)), "stopping.min_tokens", "got -1"),
    "stop empty": (spec(stopping=pb.StoppingOptions(stop=[""])), "stopping.stop[0]", "must not be empty"),
    "stop id": (spec(stopping=pb.StoppingOptions(stop_token_ids=[9999])), "stopping.stop_token_ids[0]", "9999"),
    "n 0": (spec(n=0), "n", "got 0"),
    "logprobs mode": (spec(response=pb.ResponseOptions(logprobs=9)), "response.logprobs", "got 9"),
    "top logprobs": (
        spec(response=pb.ResponseOptions(logprobs=1, num_top_logprobs=10**6)),
        "response.num_top_logprobs",
        "got 1000000",
    ),
    "stage type": (spec(sampling=pb.SamplingOptions(stages=[STAGE])), "sampling.stages[0].parameters.top_k", "3.0"),
    "stage empty value": (
        spec(sampling=pb.SamplingOptions(stages=[pb.Stage(name="top_k", parameters={"top_k": value_pb2.Value()})])),
        "sampling.stages[0].parameters.top_k",
        "has no value",
    ),
    "stage deep": (
        spec(sampling=pb.SamplingOptions(stages=[pb.Stage(name="top_k", parameters={"top_k": DEEP})])),
        "sampling.stages[0].parameters.top_k",
        "deep",
    ),
    "stage unknown": (spec(sampling=pb.SamplingOptions(stages=[pb.Stage(name="x")])), "sampling.stages[0].name", "'x'"),
    "order unknown": (spec(sampling=pb.SamplingOptions(order=["x"])), "sampling.order[0]", "'x'"),
    "min_p": (spec(sampling=pb.SamplingOptions(min_p=NAN)), "sampling.min_p", "above 0 and at most 1"),
    "bias id": (
        spec(sampling=pb.SamplingOptions(logit_bias=pb.TokenBiases(biases={4000: 1.0}))),
        "sampling.logit_bias.4000",
        "received 4000",
    ),
    "bias inf": (
        spec(sampling=pb.SamplingOptions(logit_bias=pb.TokenBiases(biases={4: INF}))),
        "sampling.logit_bias.4",
        "inf",
    ),
    "allowed none": (
        spec(sampling=pb.SamplingOptions(allowed_token_ids=pb.TokenIds())),
        "sampling.allowed_token_ids",
        "at least 1 item",
    ),
    "bad word empty": (
        spec(sampling=pb.SamplingOptions(bad_words=pb.Texts(texts=["a", ""]))),
        "sampling.bad_words[1]",
        "at least 1 character",
    ),
    "suppressed id": (
        spec(sampling=pb.SamplingOptions(suppress_tokens=pb.TokenIds(ids=[4000]))),
        "sampling.suppress_tokens[0]",
        "received 4000",
    ),
    "preset": (spec(preset="x"), "preset", "creative"),
    "adapter": (spec(adapter="x"), "adapter", "'x'"),
}


def _stream_all(stub: generation_pb2_grpc.GenerationServiceStub) -> Callable[[pb.GenerationSpec], object]:
    return lambda spec: list(stub.GenerateStream(pb.GenerateStreamRequest(spec=spec)))


def details(error: grpc.RpcError) -> list[object]:
    """Return the details that a status carries."""
    packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
    unpacked: list[object] = []
    for detail in status_pb2.Status.FromString(packed).details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
            if detail.Is(kind.DESCRIPTOR):
                message = kind()
                detail.Unpack(message)
                unpacked.append(message)
    return unpacked


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_request_names_the_field(channel: grpc.Channel, case: str, streaming: bool) -> None:
    """INVALID_ARGUMENT with a field violation, whichever RPC was called."""
    request, field, message = WRONG[case]
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    call = _stream_all(stub) if streaming else lambda spec: stub.Generate(pb.GenerateRequest(spec=spec))
    with pytest.raises(grpc.RpcError) as caught:
        call(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    bad = next(d for d in details(caught.value) if isinstance(d, error_details_pb2.BadRequest))
    assert any(v.field.startswith(field) and message in v.description for v in bad.field_violations)


def test_malformed_messages_are_invalid_arguments(channel: grpc.Channel) -> None:
    """Random bytes, a cut message and invalid UTF-8 get INVALID_ARGUMENT, on every kind of RPC."""
    whole = pb.GenerateRequest(spec=spec()).SerializeToString()
    invalid_utf8 = whole.replace(b"tiny", b"\xff\xfe\xff\xfe")
    for raw in (b"\xff\xff\xff", whole[:-1], invalid_utf8):
        for method, kind in (("Generate", channel.unary_unary), ("GenerateStream", channel.unary_stream)):
            call = kind(f"/treadle_protos.v1.GenerationService/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                list(call(raw)) if method == "GenerateStream" else call(raw)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_long_stop_list_is_refused_at_once(client: Client) -> None:
    """A list over the limit is refused by its length, not entry by entry."""
    with pytest.raises(InvalidArgumentError) as caught:
        client.generate([5, 6], model="tiny", stop=[""] * 100_000)
    assert [v.message for v in caught.value.violations] == ["must have at most 64 entries, got 100000"]


def test_five_megabyte_prompt_is_refused_by_its_tokens(channel: grpc.Channel) -> None:
    """A prompt far over the context is told its token count, not stopped by the transport."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(pb.GenerateRequest(spec=spec(text="cat " * 1_300_000)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "tokens; there is room for" in caught.value.details()


def test_message_over_the_limit_is_refused(channel: grpc.Channel) -> None:
    """The transport refuses what is over the message limit."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(pb.GenerateRequest(spec=spec(text="x" * (17 << 20))))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_unknown_model_is_not_found(client: Client) -> None:
    """The error lists the models there are."""
    with pytest.raises(NotFoundError, match="overflowing, tiny"):
        client.generate("a", model="nope")


def test_deadline_ends_the_work(client: Client) -> None:
    """A passed deadline is DEADLINE_EXCEEDED, and the engine drops all of the request within a moment."""
    with pytest.raises(DeadlineExceededError):
        client.generate([5, 6], model="tiny", ignore_eos=True, timeout_s=0.05, n=64)
    deadline_s = time.monotonic() + 1
    while any(load.num_running_sequences for load in client.get_load()):
        assert time.monotonic() < deadline_s


def test_non_finite_logits_fail_that_request(client: Client) -> None:
    """A model that overflows gives INTERNAL and says why and whose weights, in generation and in scoring."""
    with pytest.raises(ServerInternalError, match=r"logit.*\(model 'overflowing', weight version 1\)"):
        client.generate([5, 6], model="overflowing", max_tokens=3)
    with pytest.raises(ServerInternalError, match=r"not finite \(model 'overflowing', weight version 1\)"):
        client.score([5, 6], model="overflowing")


@pytest.mark.parametrize("how", ["raise", "nan", "shape", "mask_all", "garbage"])
def test_faulty_plugin_fails_that_request_and_is_named(client: Client, how: str) -> None:
    """A stage that raises or returns garbage is named with its plugin; a stream beside it goes on."""
    with client.stream([5, 6], model="tiny", seed=1, max_tokens=40, ignore_eos=True) as beside:
        next(iter(beside))
        with pytest.raises(ServerInternalError, match="'faulty' of plugin 'faulty'"):
            client.generate([5, 6], model="tiny", stages=[("faulty", {"how": how})])
        assert sum(1 for chunk in beside if chunk.finish) == 1


def test_contradiction_in_a_request_is_an_invalid_argument(client: Client) -> None:
    """Constraints that leave no token are the client's to mend."""
    with pytest.raises(InvalidArgumentError, match="no token is left"):
        client.generate([5, 6], model="tiny", allowed_token_ids=[5], suppress_tokens=[5])


def test_broken_plugin_is_listed_with_its_reason(client: Client) -> None:
    """A plugin that cannot be imported stops nothing, and ListSamplers says why it is not there."""
    plugins = {plugin.name: plugin for plugin in client.list_samplers().plugins}
    assert plugins["broken"].status == "failed"
    assert "no such thing" in plugins["broken"].reason
    assert plugins["faulty"].status == "active"


def test_full_queue_is_resource_exhausted_with_a_time_to_retry(tiny_folder: Path, plugin_dir: Path) -> None:
    """Beyond the queue's limit the answer comes at once and carries RetryInfo; what was accepted finishes."""
    config = ServerConfig(port=0, max_running=1, max_queued_requests=1, plugin_dirs=(plugin_dir,), grace_s=0)
    slow = {"stages": [("faulty", {"how": "sleep"})], "ignore_eos": True}
    with embedded_server([f"tiny={tiny_folder}"], config) as target, Client(target, retries=0) as client:
        running = client.stream([5, 6], max_tokens=60, **slow)
        next(iter(running))
        waiting = client.stream([5, 6], max_tokens=2, **slow)
        while client.get_load()[0].num_waiting_requests == 0:
            time.sleep(0.001)
        with pytest.raises(QueueFullError) as caught:
            client.generate([5, 6], max_tokens=1)
        assert caught.value.retry_after_s > 0
        for stream in (running, waiting):
            assert list(stream)[-1].finish.reason == "max_tokens"


def test_template_that_raises_is_an_invalid_argument(tiny_folder: Path, tmp_path: Path) -> None:
    """The template's own words reach the client."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with embedded_server([str(folder)], ServerConfig(port=0, grace_s=0)) as target, Client(target) as client:
        with pytest.raises(InvalidArgumentError, match="roles must alternate"):
            client.generate([{"role": "user", "content": "hi"}])
        assert client.generate("hi", max_tokens=1).choices
