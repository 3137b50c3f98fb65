"""The asynchronous client over real gRPC: the same behaviour with await."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from treadle_client import (
    AsyncClient,
    ClientClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    QueueFullError,
    UnauthenticatedError,
    UnavailableError,
)
from treadle_protos.v1 import generation_pb2, model_pb2


async def left(wait_left: Callable[[], bool]) -> bool:
    """Wait off the event loop until the server saw the RPC end."""
    return await asyncio.to_thread(wait_left)


async def test_chunks_arrive_in_order(async_client: AsyncClient, story: Any) -> None:
    """Iterating yields the deltas, then the end; what arrived is readable."""
    stream = async_client.stream("a", seed=7)
    chunks = [chunk async for chunk in stream]
    assert [chunk.text for chunk in chunks] == ["cat", " mouse", ""]
    assert stream.prompt_info is not None
    assert (stream.prompt_info.seed, stream.text, stream.finishes[0].reason) == (7, "cat mouse", "max_tokens")
    assert [chunk async for chunk in stream] == []


async def test_unary_calls(async_client: AsyncClient, script: Any) -> None:
    """Every unary verb sends its request and converts its answer."""
    script.replies["Detokenize"] = generation_pb2.DetokenizeResponse(text="cat")
    script.replies["GetModel"] = model_pb2.GetModelResponse(model=model_pb2.Model(name="tiny"))
    assert await async_client.detokenize([1]) == "cat"
    assert (await async_client.get_model("tiny")).name == "tiny"
    assert (await async_client.generate("a", n=2)).choices == ()
    assert (await async_client.score([1], top_logprobs=2)).total_logprob == 0
    assert await async_client.tokenize("a") == ()
    assert await async_client.list_models() == ()
    assert (await async_client.list_samplers()).plugins == ()
    assert (await async_client.server_info()).capabilities == ()
    assert await async_client.get_load() == ()
    assert list(await async_client.trace("a")) == []
    assert len(await async_client.preview("a")) == 0
    assert len(script.requests) == 11


async def test_wait_ready_waits_while_the_server_loads(async_client: AsyncClient, script: Any) -> None:
    """`wait_ready` asks until the server says SERVING."""
    script.health = [b"\x08\x02", b"\x08\x01"]
    await async_client.wait_ready(timeout_s=10)


async def test_wait_ready_bears_a_server_that_goes_away(async_client: AsyncClient, script: Any, failure: Any) -> None:
    """UNAVAILABLE while waiting is waited out; a server without the health service is up; other errors are raised."""
    script.health = [failure(grpc.StatusCode.UNAVAILABLE), failure(grpc.StatusCode.UNIMPLEMENTED)]
    await async_client.wait_ready()
    script.health = [failure(grpc.StatusCode.UNAUTHENTICATED, "who are you")]
    with pytest.raises(UnauthenticatedError, match="who are you"):
        await async_client.wait_ready()


async def test_close_cancels_the_rpc(async_client: AsyncClient, story: Any, wait_left: Callable[[], bool]) -> None:
    """Closing and leaving the block cancel the request on the server."""
    story.hold = True
    async with async_client.stream("a") as stream:
        await anext(stream)
        await stream.close()
    assert await left(wait_left)
    assert stream.text == "cat"


async def test_break_and_garbage_collection_cancel_the_rpc(
    async_client: AsyncClient, story: Any, wait_left: Callable[[], bool]
) -> None:
    """A stream that nobody holds any more is cancelled."""
    story.hold = True
    async for _ in async_client.stream("a"):
        break
    gc.collect()
    assert await left(wait_left)


async def test_task_cancellation_cancels_the_rpc(
    async_client: AsyncClient, story: Any, wait_left: Callable[[], bool]
) -> None:
    """Cancelling the task that waits cancels the request, and the task sees its CancelledError."""
    story.hold = True
    story.events = story.events[:3]
    stream = async_client.stream("a")

    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    while stream.text != "cat mouse":
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await left(wait_left)
    assert stream.text == "cat mouse"


async def test_close_from_another_task_ends_the_loop(async_client: AsyncClient, story: Any) -> None:
    """A loop that waits ends quietly when another task closes its stream."""
    story.hold = True
    story.events = story.events[:3]
    stream = async_client.stream("a")

    async def read() -> list[str]:
        return [chunk.text async for chunk in stream]

    task = asyncio.create_task(read())
    while stream.text != "cat mouse":
        await asyncio.sleep(0.01)
    await stream.close()
    assert await task == ["cat", " mouse"]


async def test_the_deadline_is_kept(async_client: AsyncClient, story: Any, wait_left: Callable[[], bool]) -> None:
    """`timeout_s` ends the RPC on both sides."""
    story.hold = True
    with pytest.raises(DeadlineExceededError, match=r"timeout_s=0\.5$"):
        _ = [chunk async for chunk in async_client.stream("a", timeout_s=0.5)]
    assert await left(wait_left)


async def test_errors_carry_their_details(async_client: AsyncClient, script: Any, failure: Any) -> None:
    """The trailing metadata of asyncio's calls is decoded as well."""
    request = error_details_pb2.BadRequest()
    request.field_violations.add(field="sampling.top_p", description="in (0, 1], got 7")
    script.failures.append(failure(grpc.StatusCode.INVALID_ARGUMENT, "bad", (request,)))
    with pytest.raises(InvalidArgumentError) as caught:
        await async_client.generate("a", top_p=7)
    assert caught.value.violations == (("sampling.top_p", "in (0, 1], got 7"),)


async def test_retry_after_is_honoured(async_client: AsyncClient, story: Any, failure: Any) -> None:
    """Streams and unary calls wait as long as the server says, then try again, up to `retries` times."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async_client._sleep = sleep  # type: ignore[assignment]
    info = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1))
    full = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (info,))
    story.failures.extend([full, full])
    assert [chunk.text async for chunk in async_client.stream("a")] == ["cat", " mouse", ""]
    story.failures.extend([full, full, full])
    with pytest.raises(QueueFullError) as caught:
        await async_client.tokenize("a")
    assert caught.value.retry_after_s == 1
    assert waits == [1, 1, 1, 1]


async def test_closing_during_a_retry_ends_the_loop(async_client: AsyncClient, story: Any, failure: Any) -> None:
    """A stream closed while it waits to try again ends and sends nothing more."""
    story.failures.append(failure(grpc.StatusCode.UNAVAILABLE))
    stream = async_client.stream("a")

    async def close(_: float) -> None:
        await stream.close()

    stream._sleep = close
    assert [chunk async for chunk in stream] == []
    assert len(story.requests) == 1


async def test_unreachable_servers_are_unavailable() -> None:
    """A server that is not there raises UnavailableError after the retries."""
    async with AsyncClient("127.0.0.1:9", retries=0) as client:
        with pytest.raises(UnavailableError):
            await client.server_info()


async def test_a_closed_client_says_so() -> None:
    """A call on a closed client is its own error, also for one that was never used."""
    client = AsyncClient()
    await client.close()
    with pytest.raises(ClientClosedError, match="closed"):
        await client.generate("a")


def test_a_client_may_be_made_outside_the_event_loop(server: Any, story: Any) -> None:
    """The channel opens with the first call, in the loop that runs then."""
    client = AsyncClient(server.target)

    async def use() -> str:
        async with client, client.stream("a") as stream:
            async for _ in stream:
                pass
        return stream.text

    assert asyncio.run(use()) == "cat mouse"
