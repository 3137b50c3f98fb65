"""gRPC statuses and their details into exceptions."""

import pickle
from typing import Any

import grpc
import pytest
import treadle_client
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from treadle_client import Client, InvalidArgumentError, MessageTooLargeError, TreadleClientError, Violation
from treadle_protos.v1 import generation_pb2


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("INVALID_ARGUMENT", "InvalidArgumentError"),
        ("OUT_OF_RANGE", "InvalidArgumentError"),
        ("NOT_FOUND", "NotFoundError"),
        ("ALREADY_EXISTS", "ConflictError"),
        ("FAILED_PRECONDITION", "ConflictError"),
        ("ABORTED", "ConflictError"),
        ("RESOURCE_EXHAUSTED", "QueueFullError"),
        ("UNAVAILABLE", "UnavailableError"),
        ("DEADLINE_EXCEEDED", "DeadlineExceededError"),
        ("CANCELLED", "RequestCancelledError"),
        ("UNAUTHENTICATED", "UnauthenticatedError"),
        ("PERMISSION_DENIED", "PermissionDeniedError"),
        ("UNIMPLEMENTED", "UnimplementedError"),
        ("INTERNAL", "ServerInternalError"),
        ("UNKNOWN", "ServerInternalError"),
        ("DATA_LOSS", "ServerInternalError"),
    ],
)
def test_each_code_has_its_exception(server: Any, failure: Any, code: str, name: str) -> None:
    """Every status code becomes one class, with the server's text."""
    server.script.failures.append(failure(grpc.StatusCode[code], "in the server's words"))
    with Client(server.target, retries=0) as client, pytest.raises(TreadleClientError) as caught:
        client.generate("a")
    assert type(caught.value) is getattr(treadle_client, name)
    assert str(caught.value) == caught.value.message == "in the server's words"


def test_violations_and_reason_are_decoded(client: Client, script: Any, failure: Any) -> None:
    """BadRequest becomes `violations`, ErrorInfo `reason` and `metadata`."""
    request = error_details_pb2.BadRequest()
    request.field_violations.add(field="stopping.max_tokens", description="1 or more, got 0")
    request.field_violations.add(field="n", description="1 to 8, got 0")
    info = error_details_pb2.ErrorInfo(reason="BAD_FIELDS", domain="treadle", metadata={"request_id": "r1"})
    script.failures.append(failure(grpc.StatusCode.INVALID_ARGUMENT, "bad", (request, info)))
    with pytest.raises(InvalidArgumentError) as caught:
        client.generate("a", max_tokens=0, n=0)
    assert caught.value.violations == (
        Violation("stopping.max_tokens", "1 or more, got 0"),
        Violation("n", "1 to 8, got 0"),
    )
    assert (caught.value.reason, caught.value.metadata) == ("BAD_FIELDS", {"request_id": "r1"})


def test_a_stream_read_too_slowly_is_no_full_queue(client: Client, script: Any, failure: Any) -> None:
    """Both are RESOURCE_EXHAUSTED; the reason tells them apart, and nothing is tried again."""
    info = error_details_pb2.ErrorInfo(reason="READER_TOO_SLOW", domain="treadle")
    script.failures.append(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "the reader took nothing", (info,)))
    with pytest.raises(treadle_client.SlowReaderError, match="the reader took nothing"):
        client.generate("a")


def _status_with(type_url: str, value: bytes) -> bytes:
    detail = any_pb2.Any(type_url=type_url, value=value)
    return status_pb2.Status(code=3, message="bad", details=[detail]).SerializeToString()


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff\xff",
        _status_with("type.googleapis.com/google.rpc.BadRequest", b"\xff\xff"),
        _status_with("type.googleapis.com/google.rpc.Help", b""),
        _status_with("nonsense", b"\xff"),
    ],
)
def test_unreadable_details_do_not_hide_the_status(client: Client, script: Any, failure: Any, raw: bytes) -> None:
    """Broken or foreign details leave the code and the text."""
    script.failures.append(failure(grpc.StatusCode.INVALID_ARGUMENT, "bad", raw_details=raw))
    with pytest.raises(InvalidArgumentError, match="bad") as caught:
        client.generate("a")
    assert caught.value.violations == ()


def test_a_status_without_text_has_its_codes_name(client: Client, script: Any, failure: Any) -> None:
    """An exception is never without a text."""
    script.failures.append(failure(grpc.StatusCode.NOT_FOUND, ""))
    with pytest.raises(treadle_client.NotFoundError, match="NOT_FOUND"):
        client.generate("a")


def test_a_request_over_the_clients_limit(server: Any) -> None:
    """A message over `max_message_bytes` is its own error, which names the sizes and the argument."""
    with (
        Client(server.target, max_message_bytes=1000) as client,
        pytest.raises(MessageTooLargeError, match=r"vs\. 1000\).*max_message_bytes"),
    ):
        client.generate("a" * 2000)


def test_a_request_over_the_servers_limit(start_server: Any) -> None:
    """The server's refusal by size is the same error and is not taken for a full queue."""
    server = start_server(options=(("grpc.max_receive_message_length", 1000),))
    with Client(server.target) as client, pytest.raises(MessageTooLargeError, match="1000"):
        client.generate("a" * 2000)


def test_five_megabytes_travel_both_ways(start_server: Any) -> None:
    """GRPC's own limit of 4 MB is out of the way, for requests and answers."""
    server = start_server(options=(("grpc.max_receive_message_length", 16_000_000),))
    server.script.replies["Detokenize"] = generation_pb2.DetokenizeResponse(text="b" * 5_000_000)
    with Client(server.target) as client:
        client.generate("a" * 5_000_000)
        assert len(client.detokenize([1])) == 5_000_000
    assert len(server.script.requests[0].spec.text) == 5_000_000


def test_exceptions_can_be_pickled() -> None:
    """Errors cross process borders with what they carry."""
    error = InvalidArgumentError.of([Violation("n", "1 to 8, got 0")])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.violations) == ("n: 1 to 8, got 0", error.violations)
    assert isinstance(copy, ValueError)


def test_the_servers_name_of_the_request_is_kept(server: Any, failure: Any) -> None:
    """Trailing metadata becomes `request_id`, and survives pickling; without any it is empty."""

    class Named(failure):  # type: ignore[misc] # a class that the fixture makes
        trailing_metadata = (("x-request-id", "r1"),)

    for kind, request_id in ((Named, "r1"), (failure, "")):
        server.script.failures.append(kind(grpc.StatusCode.INTERNAL))
        with Client(server.target, retries=0) as client, pytest.raises(TreadleClientError) as caught:
            client.generate("a")
        assert pickle.loads(pickle.dumps(caught.value)).request_id == caught.value.request_id == request_id
