"""From a gRPC status to an exception: the only module that knows `grpc.StatusCode`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from treadle_client._exceptions import (
    ConflictError,
    DeadlineExceededError,
    InvalidArgumentError,
    MessageTooLargeError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    RequestCancelledError,
    ServerInternalError,
    SlowReaderError,
    TreadleClientError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    Violation,
)
from treadle_client._peer import Peer

_DETAILS_KEY: Final = "grpc-status-details-bin"
_REQUEST_ID_KEY: Final = "x-request-id"
_READER_TOO_SLOW: Final = "READER_TOO_SLOW"  # the server's reason, beside a status that a full queue shares
_TOO_LARGE: Final = "message larger than max"  # gRPC's own words, for messages over the limit of either end
_CLASSES: Final[Mapping[Any, type[TreadleClientError]]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
        grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
        grpc.StatusCode.NOT_FOUND: NotFoundError,
        grpc.StatusCode.ALREADY_EXISTS: ConflictError,
        grpc.StatusCode.FAILED_PRECONDITION: ConflictError,
        grpc.StatusCode.ABORTED: ConflictError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFullError,
        grpc.StatusCode.UNAVAILABLE: UnavailableError,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
        grpc.StatusCode.CANCELLED: RequestCancelledError,
        grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
        grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    }
)


def from_rpc_error(
    error: Any, timeout_s: float | None = None, awaited: str = "complete answer", *, peer: Peer | None = None
) -> TreadleClientError:
    """Turn a failed RPC into the exception that users catch.

    Args:
        error: what grpc or grpc.aio raised: code, details and trailing metadata.
        timeout_s: seconds that the call had; None for no limit.
        awaited: what did not come in that time.
        peer: whom the call went to; None where nobody knows.
    """
    failure = _failure(error, timeout_s, awaited, peer)
    failure.request_id = next((value for key, value in error.trailing_metadata() or () if key == _REQUEST_ID_KEY), "")
    return failure


def _failure(error: Any, timeout_s: float | None, awaited: str, peer: Peer | None) -> TreadleClientError:
    message = error.details() or ""
    cls = _error_class(error.code(), message)
    if cls is DeadlineExceededError and timeout_s is not None:
        return cls(f"no {awaited} within timeout_s={timeout_s:g}")
    details = _details(error)
    arguments: dict[str, Any] = {}
    for detail in details.details if details else ():
        arguments |= _read_detail(cls, detail)
    if arguments.get("reason") == _READER_TOO_SLOW:
        cls = SlowReaderError
    return cls(_explained(cls, message or error.code().name, peer), **arguments)


def _error_class(code: Any, message: str) -> type[TreadleClientError]:
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in message:
        return MessageTooLargeError
    return _CLASSES.get(code, ServerInternalError)


def _explained(cls: type[TreadleClientError], message: str, peer: Peer | None) -> str:
    if cls is MessageTooLargeError:
        return f"{message}; max_message_bytes of the client and the server's limit both apply"
    if peer is not None and cls is UnavailableError:
        return peer.unreached(message)
    if peer is not None and cls is UnimplementedError:
        return peer.unimplemented(message)
    return message


def _details(error: Any) -> Any:
    """Return the google.rpc.Status of the trailing metadata, or None."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:  # the status itself still says what happened
                return None
    return None


def _read_detail(cls: type[TreadleClientError], detail: Any) -> dict[str, Any]:
    """Return the arguments for `cls` that one google.protobuf.Any of the details brings."""
    if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
        info = _unpacked(detail, error_details_pb2.ErrorInfo())
        return {"reason": info.reason, "metadata": dict(info.metadata)}
    if cls is InvalidArgumentError and detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
        request = _unpacked(detail, error_details_pb2.BadRequest())
        return {"violations": [Violation(v.field, v.description) for v in request.field_violations]}
    if issubclass(cls, (QueueFullError, UnavailableError)) and detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
        delay = _unpacked(detail, error_details_pb2.RetryInfo()).retry_delay
        return {"retry_after_s": delay.seconds + delay.nanos * 1e-9}
    return {}


def _unpacked(detail: Any, message: Any) -> Any:
    """Return `message` filled from `detail`, or empty when its bytes cannot be read."""
    try:
        detail.Unpack(message)
    except DecodeError:
        message.Clear()
    return message
