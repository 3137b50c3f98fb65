"""The synchronous stream over real gRPC: chunks, cancellation in every way of leaving, deadlines."""

import _thread
import gc
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from treadle_client import (
    Client,
    DeadlineExceededError,
    InvalidArgumentError,
    RequestCancelledError,
    ServerInternalError,
    Stream,
    UnavailableError,
)
from treadle_protos.v1 import generation_pb2


def test_chunks_arrive_in_order(client: Client, story: Any) -> None:
    """Iterating yields the deltas, then the end of the choice; the prompt info is no chunk."""
    chunks = list(client.stream("a", temperature=0.5))
    assert [chunk.text for chunk in chunks] == ["cat", " mouse", ""]
    assert [chunk.finish is not None for chunk in chunks] == [False, False, True]
    assert story.requests[0].spec.sampling.temperature == 0.5


def test_what_arrived_is_kept(client: Client, story: Any) -> None:
    """Prompt info, text and finish are readable as soon as they have arrived."""
    with client.stream("a") as stream:
        assert (stream.prompt_info, stream.text, stream.texts, stream.finishes) == (None, "", (), {})
        next(stream)
        assert stream.prompt_info is not None
        assert (stream.prompt_info.seed, stream.text) == (7, "cat")
        list(stream)
    assert stream.text == "cat mouse"
    assert (stream.finishes[0].reason, stream.finishes[0].usage.num_generated_tokens) == ("max_tokens", 2)


def test_choices_are_kept_apart(client: Client, script: Any) -> None:
    """Texts of several choices do not mix."""
    deltas = [(1, "b"), (0, "a"), (1, "B")]
    script.events = [
        generation_pb2.GenerateStreamResponse(delta=generation_pb2.Delta(index=i, text=text)) for i, text in deltas
    ]
    stream = client.stream("a", n=2)
    assert [chunk.index for chunk in stream] == [1, 0, 1]
    assert stream.texts == ("a", "bB")


def test_a_finished_stream_stays_finished(client: Client, story: Any) -> None:
    """After the last chunk, next raises StopIteration again and again."""
    stream = client.stream("a")
    list(stream)
    assert list(stream) == []


def test_the_request_is_sent_at_once(client: Client, story: Any) -> None:
    """`stream` sends before anyone iterates, so that several streams run beside each other."""
    story.hold = True
    first, second = client.stream("a"), client.stream("b")
    assert next(second).text == next(first).text == "cat"
    first.close()
    second.close()


def _leave_by_close(stream: Stream) -> None:
    stream.close()


def _leave_by_with(stream: Stream) -> None:
    with stream:
        next(stream)


def _leave_by_error(stream: Stream) -> None:
    with pytest.raises(KeyError), stream:
        raise KeyError


@pytest.mark.parametrize("leave", [_leave_by_close, _leave_by_with, _leave_by_error])
def test_leaving_cancels_the_rpc(
    client: Client, story: Any, wait_left: Callable[[], bool], leave: Callable[[Stream], None]
) -> None:
    """Closing, leaving the with block and an error inside it cancel the request on the server; the text stays."""
    story.hold = True
    stream = client.stream("a")
    next(stream)
    leave(stream)
    assert wait_left()
    assert stream.text.startswith("cat")
    assert list(stream) == []


def test_break_and_garbage_collection_cancel_the_rpc(client: Client, story: Any, wait_left: Callable[[], bool]) -> None:
    """A stream that nobody holds any more is cancelled."""
    story.hold = True
    for _ in client.stream("a"):
        break
    gc.collect()
    assert wait_left()


def test_ctrl_c_while_waiting_cancels_and_keeps_the_text(
    client: Client, story: Any, wait_left: Callable[[], bool]
) -> None:
    """KeyboardInterrupt inside iteration reaches the caller, cancels the RPC and loses nothing."""
    story.hold = True
    story.events = story.events[:3]
    stream = client.stream("a")
    next(stream)
    next(stream)
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert wait_left()
    assert stream.text == "cat mouse"


def test_ctrl_c_during_generate_cancels_the_rpc(client: Client, script: Any, wait_left: Callable[[], bool]) -> None:
    """KeyboardInterrupt inside a unary call reaches the caller and cancels the RPC."""
    script.hold = True
    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        client.generate("a")
    gc.collect()
    assert wait_left()


def test_close_from_another_thread_ends_the_loop(client: Client, story: Any) -> None:
    """A loop that waits ends quietly when another thread closes its stream."""
    story.hold = True
    story.events = story.events[:3]
    stream = client.stream("a")
    timer = threading.Timer(0.2, stream.close)
    timer.start()
    assert [chunk.text for chunk in stream] == ["cat", " mouse"]
    timer.join()


def test_the_deadline_reaches_the_server_and_the_caller(
    client: Client, story: Any, wait_left: Callable[[], bool]
) -> None:
    """`timeout_s` ends the RPC on both sides; DeadlineExceededError is a TimeoutError too."""
    story.hold = True
    story.events = story.events[:3]
    stream = client.stream("a", timeout_s=0.5)
    with pytest.raises(TimeoutError) as caught:
        list(stream)
    assert isinstance(caught.value, DeadlineExceededError)
    assert str(caught.value) == "no complete answer within timeout_s=0.5"
    assert wait_left()
    assert stream.text == "cat mouse"
    assert list(stream) == []


def test_the_clients_timeout_holds_where_a_call_names_none(server: Any) -> None:
    """The constructor's `timeout_s` is the default, and infinity in a call overrides it."""
    server.script.hold = True
    with Client(server.target, timeout_s=0.3) as client:
        start_s = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=r"timeout_s=0\.3$"):
            client.generate("a")
        assert time.monotonic() - start_s < 10
        server.script.hold = False
        assert client.detokenize([1], timeout_s=math.inf) == ""


@pytest.mark.parametrize("timeout_s", [-1, math.nan, True, "5"])
def test_wrong_timeouts_are_refused(client: Client, timeout_s: Any) -> None:
    """A timeout is a number of seconds, 0 or more."""
    with pytest.raises(InvalidArgumentError, match="timeout_s: expected"):
        client.stream("a", timeout_s=timeout_s)


def test_an_error_in_mid_stream_is_raised_and_not_retried(client: Client, story: Any, failure: Any) -> None:
    """Once something was received, even a retryable status ends the stream; the text stays."""
    story.events = story.events[:3]
    story.after_events = failure(grpc.StatusCode.UNAVAILABLE, "draining")
    stream = client.stream("a")
    with pytest.raises(UnavailableError, match="draining"):
        list(stream)
    assert stream.text == "cat mouse"
    assert len(story.requests) == 1


def test_a_plugin_failure_in_mid_stream_is_internal(client: Client, story: Any, failure: Any) -> None:
    """The server's own failure carries its text."""
    story.after_events = failure(grpc.StatusCode.INTERNAL, "sampler stage 'x' of plugin 'y' raised")
    with pytest.raises(ServerInternalError, match="plugin 'y'"):
        list(client.stream("a"))


def test_closing_the_client_ends_its_streams(server: Any, story: Any, wait_left: Callable[[], bool]) -> None:
    """Streams of a closed client are cancelled, and say so."""
    story.hold = True
    with Client(server.target) as client:
        stream = client.stream("a")
        next(stream)
    with pytest.raises(RequestCancelledError):
        list(stream)
    assert wait_left()
