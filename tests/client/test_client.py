"""The synchronous client's unary calls, readiness and retries."""

import socket
import threading
import time
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from treadle_client import (
    Client,
    ClientClosedError,
    DeadlineExceededError,
    Message,
    QueueFullError,
    Stage,
    TopLogprob,
    UnauthenticatedError,
    UnavailableError,
)
from treadle_client._exceptions import TreadleClientError
from treadle_client._retry import Attempts
from treadle_protos.v1 import generation_pb2, model_pb2, sampler_pb2, server_pb2, value_pb2


class Clock:
    """Seconds that pass only in `sleep`, which notes them."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.waits: list[float] = []

    def seconds(self) -> float:
        """Return the seconds now."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let the seconds pass."""
        self.waits.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(client: Client) -> Clock:
    """A clock in the client's hands."""
    clock = Clock()
    client._clock = clock.seconds
    client._sleep = clock.sleep
    return clock


def retry_info(seconds: int, nanos: int = 0) -> error_details_pb2.RetryInfo:
    """Return the detail that asks to come back later."""
    return error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds, nanos=nanos))


def test_generate_returns_everything(client: Client, script: Any) -> None:
    """The answer holds prompt info, choices with logprobs, and how each ended."""
    top = generation_pb2.TopLogprob(token_id=5, token=b"c", logprob=-0.5)
    choice = generation_pb2.Choice(index=0, text="cat", token_ids=[5])
    choice.logprobs.add(token_id=5, token=b"c", logprob=-0.5, rank=1, top=[top])
    choice.logprobs.add(token_id=6)
    choice.finish_info.CopyFrom(
        generation_pb2.FinishInfo(reason=generation_pb2.FINISH_REASON_STOP_STRING, stop_string="", weight_version=3)
    )
    choice.finish_info.timings.prefill.CopyFrom(duration_pb2.Duration(seconds=1, nanos=500_000_000))
    info = generation_pb2.PromptInfo(seed=2**64 - 1, prompt_token_ids=[1])
    info.knobs["temperature"].CopyFrom(value_pb2.Value(double_value=1.0))
    info.chain.add(name="top_k").parameters["k"].int_value = 4
    script.replies["Generate"] = generation_pb2.GenerateResponse(prompt_info=info, choices=[choice])
    result = client.generate("a")
    assert result.text == "cat"
    first, second = result.choices[0].logprobs
    assert (first.rank, first.top) == (1, (TopLogprob(token_id=5, token=b"c", logprob=-0.5),))
    assert (second.logprob, second.rank) == (None, None)
    finish = result.choices[0].finish
    assert (finish.reason, finish.stop_string, finish.eos_token_id) == ("stop_string", "", None)
    assert (finish.timings.prefill_s, finish.weight_version) == (1.5, 3)
    assert result.prompt_info.knobs == {"temperature": 1.0}
    assert result.prompt_info.chain == (Stage("top_k", {"k": 4}),)
    assert (result.prompt_info.seed, result.prompt_info.prompt_token_ids) == (2**64 - 1, (1,))


def test_reasons_of_a_newer_server_are_shown_by_number(client: Client, script: Any) -> None:
    """An unknown enum value becomes a name that says so, not an error."""
    choice = generation_pb2.Choice()
    choice.finish_info.reason = 77  # type: ignore[assignment]
    script.replies["Generate"] = generation_pb2.GenerateResponse(choices=[choice])
    assert client.generate("a").choices[0].finish.reason == "unknown_77"


def test_score(client: Client, script: Any) -> None:
    """Score sends its fields and returns raw log-probabilities."""
    reply = generation_pb2.ScoreResponse(model="tiny", weight_version=1, total_logprob=-2.0)
    reply.raw_logprobs.add(token_id=1)
    script.replies["Score"] = reply
    score = client.score([1], model="tiny", adapter="x", top_logprobs=0)
    assert (score.raw_logprobs[0].logprob, score.total_logprob) == (None, -2.0)
    request = script.requests[0]
    assert (request.model, request.adapter, request.HasField("num_top_logprobs")) == ("tiny", "x", True)


def test_tokenize_and_detokenize(client: Client, script: Any) -> None:
    """Texts become tokens with their characters, and ids a text."""
    token = generation_pb2.Token(id=1, token=b"\xe7", start=0, end=1)
    script.replies["Tokenize"] = generation_pb2.TokenizeResponse(tokens=[token])
    script.replies["Detokenize"] = generation_pb2.DetokenizeResponse(text="猫")
    (result,) = client.tokenize([Message("user", "猫")], add_special_tokens=False)
    assert (result.id, result.token, result.start, result.end) == (1, b"\xe7", 0, 1)
    assert client.detokenize([1], special_tokens=True) == "猫"
    assert script.requests[1].special_tokens


def test_models(client: Client, script: Any) -> None:
    """Models come back with None for a BOS that does not exist."""
    model = model_pb2.Model(name="tiny", eos_token_ids=[0], bos_token_id=0)
    script.replies["ListModels"] = model_pb2.ListModelsResponse(models=[model, model_pb2.Model(name="b")])
    script.replies["GetModel"] = model_pb2.GetModelResponse(model=model)
    assert [m.bos_token_id for m in client.list_models()] == [0, None]
    assert client.get_model("tiny").eos_token_ids == (0,)
    assert script.requests[1].model == "tiny"


def test_samplers(client: Client, script: Any) -> None:
    """Stages and plugins come back with short names for kinds and statuses."""
    script.replies["ListSamplers"] = sampler_pb2.ListSamplersResponse(
        samplers=[sampler_pb2.Sampler(name="top_k", kind=sampler_pb2.SAMPLER_KIND_FILTER)],
        plugins=[sampler_pb2.Plugin(name="p", status="PLUGIN_STATUS_NOT_INSTALLED", reason="no", losses=["l"])],
    )
    listing = client.list_samplers()
    assert listing.samplers[0].kind == "filter"
    assert (listing.plugins[0].status, listing.plugins[0].losses) == ("not_installed", ("l",))


def test_server_info_and_load(client: Client, script: Any) -> None:
    """The server's limits and load arrive under their own names."""
    info = server_pb2.GetServerInfoResponse(version="1", limits=server_pb2.Limits(max_choices=8))
    info.uptime.CopyFrom(duration_pb2.Duration(seconds=2))
    script.replies["GetServerInfo"] = info
    load = server_pb2.ModelLoad(model="tiny", kv_cache_bytes=3)
    script.replies["GetLoad"] = server_pb2.GetLoadResponse(models=[load])
    result = client.server_info()
    assert (result.version, result.limits.max_choices, result.uptime_s) == ("1", 8, 2.0)
    assert client.get_load()[0].kv_cache_bytes == 3


def test_the_queues_retry_after_is_honoured(client: Client, script: Any, failure: Any, clock: Clock) -> None:
    """A full queue is asked again after exactly as long as it said."""
    full = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (retry_info(1, 500_000_000),))
    script.failures.extend([full, full])
    client.generate("a")
    assert clock.waits == [1.5, 1.5]


def test_retries_are_limited(client: Client, script: Any, failure: Any, clock: Clock) -> None:
    """After `retries` repeats the error reaches the caller, with its seconds."""
    script.failures.extend([failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (retry_info(1),))] * 3)
    with pytest.raises(QueueFullError, match="full") as caught:
        client.generate("a")
    assert (caught.value.retry_after_s, clock.waits) == (1.0, [1.0, 1.0])


def test_retries_stay_within_the_timeout(client: Client, script: Any, failure: Any, clock: Clock) -> None:
    """Where the server says to come back after the timeout, the error comes at once."""
    script.failures.append(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (retry_info(60),)))
    with pytest.raises(QueueFullError):
        client.generate("a", timeout_s=30)
    assert clock.waits == []


def test_exhaustion_without_a_time_is_not_retried(client: Client, script: Any, failure: Any, clock: Clock) -> None:
    """RESOURCE_EXHAUSTED without RetryInfo says nothing about later."""
    script.failures.append(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much"))
    with pytest.raises(QueueFullError) as caught:
        client.generate("a")
    assert (caught.value.retry_after_s, clock.waits) == (None, [])


def test_stream_openings_are_retried(client: Client, story: Any, failure: Any, clock: Clock) -> None:
    """A stream that failed before anything arrived opens again; growing waits where the server names none."""
    story.failures.extend([failure(grpc.StatusCode.UNAVAILABLE)] * 2)
    assert [chunk.text for chunk in client.stream("a")] == ["cat", " mouse", ""]
    assert clock.waits == [0.2, 0.4]


def test_a_stream_closed_during_a_retry_ends(client: Client, story: Any, failure: Any) -> None:
    """A stream closed while it waits to try again ends and sends nothing more."""
    story.failures.append(failure(grpc.StatusCode.UNAVAILABLE))
    stream = client.stream("a")
    stream._sleep = lambda _: stream.close()
    assert list(stream) == []
    assert len(story.requests) == 1


def test_growing_waits_have_a_limit() -> None:
    """Waits for an unreachable server double up to five seconds."""
    attempts = Attempts(retries=7, timeout_s=None, clock=time.monotonic)
    waits = [attempts.next_delay_s(UnavailableError("away")) for _ in range(8)]
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, None]


def test_other_errors_are_not_retried(client: Client, script: Any, failure: Any, clock: Clock) -> None:
    """A refused request is not sent twice."""
    script.failures.append(failure(grpc.StatusCode.INVALID_ARGUMENT))
    with pytest.raises(TreadleClientError):
        client.generate("a")
    assert (clock.waits, len(script.requests)) == ([], 1)


def test_unreachable_servers_are_unavailable() -> None:
    """A server that is not there raises UnavailableError after the retries."""
    with Client("127.0.0.1:9", retries=1) as client, pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9"):
        client.server_info()


def test_wait_ready_waits_while_the_server_loads(client: Client, script: Any, clock: Clock) -> None:
    """`wait_ready` asks until the server says SERVING."""
    script.health = [b"\x08\x02", b"\x08\x02", b"\x08\x01"]
    client.wait_ready()
    assert clock.waits == [0.1, 0.1]


def test_wait_ready_gives_up_in_time(client: Client, script: Any) -> None:
    """A server that stays NOT_SERVING, and one that is not there, end in DeadlineExceededError."""
    script.health = [b"\x08\x02"]
    with pytest.raises(DeadlineExceededError, match=r"^no ready server at \S+ within timeout_s=0\.4$"):
        client.wait_ready(timeout_s=0.4)
    with Client("127.0.0.1:9") as nobody, pytest.raises(DeadlineExceededError):
        nobody.wait_ready(timeout_s=0.4)


def test_wait_ready_waits_for_a_server_that_comes_later(start_server: Any) -> None:
    """A client may be made and wait before its server listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Client(f"127.0.0.1:{port}") as client:
        waiter = threading.Thread(target=client.wait_ready, args=(20,))
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive()
        start_server(port=port)
        waiter.join(20)
        assert not waiter.is_alive()
        client.server_info()


def test_wait_ready_bears_a_server_that_goes_away(client: Client, script: Any, failure: Any) -> None:
    """UNAVAILABLE while waiting is waited out; a server without the health service is up; other errors are raised."""
    script.health = [failure(grpc.StatusCode.UNAVAILABLE), failure(grpc.StatusCode.UNIMPLEMENTED)]
    client.wait_ready()
    script.health = [failure(grpc.StatusCode.UNAUTHENTICATED, "who are you")]
    with pytest.raises(UnauthenticatedError, match="who are you"):
        client.wait_ready()


def test_an_unavailable_servers_own_time_is_honoured(client: Client, script: Any, failure: Any, clock: Clock) -> None:
    """A server that drains may say when to come back."""
    script.failures.append(failure(grpc.StatusCode.UNAVAILABLE, "draining", (retry_info(3),)))
    client.generate("a")
    assert clock.waits == [3.0]


def test_a_closed_client_says_so(client: Client) -> None:
    """A call on a closed client is its own error."""
    client.close()
    for call in (lambda: client.stream("a"), lambda: client.generate("a"), client.wait_ready):
        with pytest.raises(ClientClosedError, match="closed"):
            call()
