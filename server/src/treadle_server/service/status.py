"""Turns errors into gRPC statuses with details. The one module that knows `grpc.StatusCode`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from treadle_server.errors import (
    AccessDeniedError,
    AdapterNotFoundError,
    ChatTemplateError,
    CheckpointError,
    CheckpointWriteError,
    ConstraintError,
    EngineError,
    InvalidRequestError,
    ModelExistsError,
    ModelNotFoundError,
    NonFiniteLogitsError,
    NotSupportedError,
    PublishDeniedError,
    PublishError,
    PublishTargetError,
    QueueFullError,
    SequenceNumberError,
    SlowReaderError,
    StageError,
    TrainingError,
    TreadleError,
    UnauthenticatedError,
    UnavailableError,
    VersionConflictError,
)

_DOMAIN = "treadle"
_DETAILS_KEY = "grpc-status-details-bin"
# Seconds by which a client's deadline may pass before the server's copy of it.
_DEADLINE_SLACK_S = 0.1
# A status travels in HTTP/2 headers, which peers limit to 8 KB: the message as it is, three bytes for each of one that
# is not ASCII, and the details in base64.
_MAX_MESSAGE_BYTES = 600
_MAX_VIOLATIONS_BYTES = 2400

# Error type: status code and stable reason, the first that fits.
_STATUSES: Mapping[type[Exception], tuple[grpc.StatusCode, str]] = {
    InvalidRequestError: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    ChatTemplateError: (grpc.StatusCode.INVALID_ARGUMENT, "CHAT_TEMPLATE_FAILED"),
    UnauthenticatedError: (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    AccessDeniedError: (grpc.StatusCode.PERMISSION_DENIED, "ACCESS_DENIED"),
    ModelNotFoundError: (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    AdapterNotFoundError: (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND"),
    ModelExistsError: (grpc.StatusCode.ALREADY_EXISTS, "MODEL_EXISTS"),
    VersionConflictError: (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_CONFLICT"),
    QueueFullError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    SlowReaderError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "READER_TOO_SLOW"),
    UnavailableError: (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
    NotSupportedError: (grpc.StatusCode.UNIMPLEMENTED, "NOT_SUPPORTED"),
    ConstraintError: (grpc.StatusCode.INVALID_ARGUMENT, "CONSTRAINTS_CONTRADICT"),
    StageError: (grpc.StatusCode.INTERNAL, "SAMPLER_STAGE_FAILED"),
    NonFiniteLogitsError: (grpc.StatusCode.INTERNAL, "NON_FINITE_LOGITS"),
    EngineError: (grpc.StatusCode.INTERNAL, "ENGINE_FAILED"),
    CheckpointWriteError: (grpc.StatusCode.FAILED_PRECONDITION, "CHECKPOINT_NOT_WRITTEN"),
    CheckpointError: (grpc.StatusCode.FAILED_PRECONDITION, "CHECKPOINT_INVALID"),
    TrainingError: (grpc.StatusCode.FAILED_PRECONDITION, "TRAINING_REFUSED"),
    SequenceNumberError: (grpc.StatusCode.FAILED_PRECONDITION, "SEQUENCE_NUMBER"),
    PublishTargetError: (grpc.StatusCode.UNAVAILABLE, "PUBLISH_TARGET_UNAVAILABLE"),
    PublishDeniedError: (grpc.StatusCode.PERMISSION_DENIED, "PUBLISH_DENIED"),
    PublishError: (grpc.StatusCode.FAILED_PRECONDITION, "PUBLISH_REFUSED"),
    TreadleError: (grpc.StatusCode.INTERNAL, "INTERNAL"),
}


async def abort(context: grpc.aio.ServicerContext, error: TreadleError) -> NoReturn:
    """End the RPC with the error's status and details."""
    code, reason = _status_of(error)
    message = cut(str(error), _MAX_MESSAGE_BYTES)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN)]
    details += _details(error)
    status = status_pb2.Status(code=code.value[0], message=message, details=[_pack(detail) for detail in details])
    metadata = (*(context.trailing_metadata() or ()), (_DETAILS_KEY, status.SerializeToString()))
    await context.abort(code, message, trailing_metadata=metadata)
    raise AssertionError("abort always raises")


def _status_of(error: TreadleError) -> tuple[grpc.StatusCode, str]:
    return next(status for kind, status in _STATUSES.items() if isinstance(error, kind))


def reason_of_status(error: TreadleError) -> str:
    """Return the stable reason that goes with an error, such as QUEUE_FULL."""
    return _status_of(error)[1]


def ended_with(context: grpc.aio.ServicerContext, error: BaseException | None) -> str:
    """Return the name of the status that an RPC ends with, given what ended its handler.

    gRPC cancels a handler both when the client has gone and when its deadline has passed; the client, whose clock
    started first, may hang up a moment before the server's says so.
    """
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        left_s = context.time_remaining()
        late = left_s is not None and left_s <= _DEADLINE_SLACK_S
        return str((grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED).name)
    number = context.code()
    if number is None:  # nobody set one
        return "OK" if error is None else "UNKNOWN"
    return next((code.name for code in grpc.StatusCode if number in (code, code.value[0])), "UNKNOWN")


async def abort_malformed(context: grpc.aio.ServicerContext, name: str) -> NoReturn:
    """End an RPC whose message cannot be parsed."""
    message = f"the message is no valid {name}: it is cut short, or a text in it is not UTF-8"
    await abort(context, InvalidRequestError.of("", message))


async def abort_internal(context: grpc.aio.ServicerContext) -> NoReturn:
    """End an RPC that met a fault of the server itself."""
    await abort(context, EngineError("the server met a fault of its own; its log says which"))


def _details(error: TreadleError) -> list[Message]:
    if isinstance(error, InvalidRequestError):
        return [_bad_request(error)]
    if isinstance(error, QueueFullError):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]
    return []


def _bad_request(error: InvalidRequestError) -> error_details_pb2.BadRequest:
    """Return the violations, as many as fit."""
    bad = error_details_pb2.BadRequest()
    for violation in error.violations:
        field, description = cut(violation.field, _MAX_MESSAGE_BYTES), cut(violation.message, _MAX_MESSAGE_BYTES)
        added = bad.field_violations.add(field=field, description=description)
        if bad.ByteSize() > _MAX_VIOLATIONS_BYTES:
            bad.field_violations.remove(added)
            break
    return bad


def cut(text: str, max_bytes: int) -> str:
    """Return a text that is valid UTF-8 of at most `max_bytes` and an ellipsis, with no lone surrogates."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode("utf-8")
    return raw[:max_bytes].decode("utf-8", "ignore") + "..."


def _pack(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def is_unreachable(error: grpc.RpcError) -> bool:
    """Whether a call to another server failed because that one does not answer."""
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def is_denied(error: grpc.RpcError) -> bool:
    """Whether another server refused a call because of who called, or what it asked for."""
    return error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
