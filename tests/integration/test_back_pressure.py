"""Readers that lag and deadlines that pass, over gRPC: the work stops, memory is freed, and nobody else notices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from treadle_client import Client, DeadlineExceededError, ModelLoad
from treadle_protos.v1 import generation_pb2 as pb
from treadle_protos.v1 import generation_pb2_grpc
from treadle_server.config import ServerConfig
from treadle_server.service.embedded import embedded_server

# A token of this request takes 2 KB. gRPC itself buffers 64 KB before it holds the server up, and more where it guesses
# that the connection is a fast one, which it is told not to.
HEAVY = pb.GenerationSpec(
    token_ids=pb.TokenIds(ids=[5, 6]),
    stopping=pb.StoppingOptions(max_tokens=120, ignore_eos=True),
    response=pb.ResponseOptions(logprobs=pb.LOGPROBS_MODE_RAW, num_top_logprobs=128, token_ids=True),
    sampling=pb.SamplingOptions(seed=3),
    n=4,
)
# 20 ms a step for everybody beside it.
SLOW: dict[str, Any] = {"stages": [("faulty", {"how": "sleep"})], "ignore_eos": True}
SETTINGS: dict[str, Any] = {"port": 0, "grace_s": 0, "max_buffered_tokens": 1000, "numerics": "reproducible"}


@pytest.fixture
def serve(tiny_folder: Path, plugin_dir: Path) -> Iterator[Callable[..., str]]:
    """Start a server with the tiny model and these settings; return its address."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(**settings: Any) -> str:
            config = ServerConfig(**{**SETTINGS, "plugin_dirs": (plugin_dir,), **settings})
            return stack.enter_context(embedded_server([f"tiny={tiny_folder}"], config))

        yield start


def open_heavy(target: str, **options: Any) -> tuple[grpc.Channel, Any]:
    """Begin a heavy stream and read nothing of it."""
    channel = grpc.insecure_channel(target, [("grpc.http2.bdp_probe", 0)])
    stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
    return channel, stub.GenerateStream(pb.GenerateStreamRequest(spec=HEAVY), **options)


def wait_for(client: Client, condition: Callable[[ModelLoad], bool]) -> ModelLoad:
    """Wait until the model's load is so; fail after ten seconds."""
    deadline = time.monotonic() + 10
    while not condition(load := client.get_load()[0]):
        assert time.monotonic() < deadline, load
        time.sleep(0.01)
    return load


def wait_until_paused(client: Client) -> ModelLoad:
    """Wait until nothing more is made for the heavy stream: full for a moment is not yet held up."""
    before = -1
    while (load := wait_for(client, lambda load: load.num_paused_sequences == 4)).num_generated_tokens != before:
        before = load.num_generated_tokens
        time.sleep(0.2)
    return load


def is_idle(load: ModelLoad) -> bool:
    """Tell whether nothing is held and nothing waits."""
    held = load.num_running_sequences, load.num_waiting_requests, load.num_preempted_sequences, load.kv_cache_bytes
    return not any(held)


def test_a_client_that_does_not_read_is_paused_and_holds_nobody_up(serve: Callable[..., str]) -> None:
    """What waits for it is bounded, others run at full speed, and it gets every token once it reads."""
    target = serve()
    with Client(target) as client:
        channel, lagging = open_heavy(target)
        load = wait_until_paused(client)
        assert load.num_generated_tokens < 4 * 120
        assert client.generate([7, 8], max_tokens=60, ignore_eos=True).choices
        still = client.get_load()[0]
        assert still.num_generated_tokens == load.num_generated_tokens + 60
        ids: dict[int, list[int]] = {}
        for message in lagging:
            ids.setdefault(message.delta.index, []).extend(message.delta.token_ids)
        assert [len(choice) for choice in ids.values()] == [120] * 4
        channel.close()
        wait_for(client, is_idle)


def test_a_client_that_never_reads_loses_its_stream(serve: Callable[..., str]) -> None:
    """After max_stall_s the keys and values are free; what was sent before is followed by the reason."""
    target = serve(max_stall_s=1.0)
    with Client(target) as client:
        channel, lagging = open_heavy(target)
        wait_until_paused(client)
        wait_for(client, is_idle)
        with pytest.raises(grpc.RpcError, match="the reader took nothing for 1 s") as caught:
            list(lagging)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        channel.close()


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_a_paused_stream_ends_with_its_rpc(serve: Callable[..., str], how: str) -> None:
    """Cancelled, past its deadline, or disconnected: memory is free at once."""
    target = serve()
    with Client(target) as client:
        channel, lagging = open_heavy(target, **({"timeout": 2.0} if how == "deadline" else {}))
        wait_until_paused(client)
        if how == "cancel":
            lagging.cancel()
        elif how == "close":
            channel.close()
        wait_for(client, is_idle)
        channel.close()


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_a_deadline_holds_in_the_queue(serve: Callable[..., str], kind: str) -> None:
    """A request that waits is forgotten when its time is over."""
    target = serve(max_running=1)
    with Client(target) as client, client.stream([5, 6], max_tokens=100, **SLOW) as running:
        next(iter(running))
        with pytest.raises(DeadlineExceededError):
            ask(client, [5, 6], kind, timeout_s=0.2)
        wait_for(client, lambda load: load.num_waiting_requests == 0)
        assert client.get_load()[0].num_running_sequences == 1


@pytest.mark.parametrize("kind", ["unary", "stream", "score"])
def test_a_deadline_holds_in_prefill(serve: Callable[..., str], kind: str) -> None:
    """Checked between two chunks: 100 tokens at one a step of 20 ms would take two seconds."""
    target = serve(max_prefill_tokens_beside_decode=1)
    with Client(target) as client, client.stream([5, 6], max_tokens=120, **SLOW) as running:
        next(iter(running))
        with pytest.raises(DeadlineExceededError):
            ask(client, [9] * 100, kind, timeout_s=0.3)
        load = wait_for(client, lambda load: load.num_running_sequences == 1)
        assert load.num_waiting_requests == 0


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_a_deadline_holds_in_decode(serve: Callable[..., str], kind: str) -> None:
    """What came before it is kept by a reader of the stream."""
    target = serve()
    with Client(target) as client:
        with pytest.raises(DeadlineExceededError):
            ask(client, [5, 6], kind, timeout_s=0.4, max_tokens=120, **SLOW)
        load = wait_for(client, is_idle)
        assert load.num_generated_tokens < 120


def ask(client: Client, prompt: list[int], kind: str, *, timeout_s: float, **options: Any) -> None:
    """Use a prompt by one of the RPCs that go through the engine."""
    if kind == "score":
        client.score(prompt, timeout_s=timeout_s)
    elif kind == "unary":
        client.generate(prompt, timeout_s=timeout_s, **options)
    else:
        list(client.stream(prompt, timeout_s=timeout_s, **options))


def test_priority_goes_over_the_wire(serve: Callable[..., str]) -> None:
    """The later request of higher priority starts first; one out of range is refused by name."""
    target = serve(max_running=1)
    with Client(target) as client:
        running = client.stream([5, 6], max_tokens=40, **SLOW)
        next(iter(running))
        low = client.stream([5, 6], max_tokens=1, priority=-1)
        wait_for(client, lambda load: load.num_waiting_requests == 1)
        high = client.stream([5, 6], max_tokens=1, priority=5)
        wait_for(client, lambda load: load.num_waiting_requests == 2)
        waited_s = [list(stream)[-1].finish.timings.queue_s for stream in (running, low, high)]
        assert waited_s[2] < waited_s[1]
        with pytest.raises(Exception, match="priority"):
            client.generate([5], priority=200)


def test_load_tells_of_the_prefix_cache(serve: Callable[..., str]) -> None:
    """Tokens looked for, tokens found, and the bytes that they take."""
    target = serve()
    with Client(target) as client:
        for _ in range(2):
            client.generate([9] * 100, max_tokens=1)
        load = client.get_load()[0]
    assert load.num_prefix_queried_tokens == 2 * 99
    assert load.num_prefix_hit_tokens == 99
    assert 0 < load.prefix_cache_bytes <= load.max_prefix_cache_bytes
