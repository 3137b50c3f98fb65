"""Turns errors into gRPC statuses with details. The one module that knows `grpc.StatusCode`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from treadle_server.errors import (
    ChatTemplateError,
    CheckpointError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    NonFiniteLogitsError,
    NotSupportedError,
    QueueFullError,
    StageError,
    TreadleError,
    UnavailableError,
)

_DOMAIN = "treadle"
_DETAILS_KEY = "grpc-status-details-bin"
# A status travels in HTTP/2 headers, which peers limit to 8 KB or so.
_MAX_MESSAGE_LENGTH = 2000
_MAX_VIOLATIONS = 8

# Error type: status code and stable reason, the first that fits.
_STATUSES: Mapping[type[Exception], tuple[grpc.StatusCode, str]] = {
    InvalidRequestError: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    ChatTemplateError: (grpc.StatusCode.INVALID_ARGUMENT, "CHAT_TEMPLATE_FAILED"),
    ModelNotFoundError: (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    QueueFullError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    UnavailableError: (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
    NotSupportedError: (grpc.StatusCode.UNIMPLEMENTED, "NOT_SUPPORTED"),
    StageError: (grpc.StatusCode.INTERNAL, "SAMPLER_STAGE_FAILED"),
    NonFiniteLogitsError: (grpc.StatusCode.INTERNAL, "NON_FINITE_LOGITS"),
    EngineError: (grpc.StatusCode.INTERNAL, "ENGINE_FAILED"),
    CheckpointError: (grpc.StatusCode.FAILED_PRECONDITION, "CHECKPOINT_INVALID"),
    TreadleError: (grpc.StatusCode.INTERNAL, "INTERNAL"),
}


async def abort(context: grpc.aio.ServicerContext, error: TreadleError) -> NoReturn:
    """End the RPC with the error's status and details."""
    code, reason = next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
    message = str(error)[:_MAX_MESSAGE_LENGTH]
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN)]
    details += _details(error)
    status = status_pb2.Status(code=code.value[0], message=message, details=[_pack(detail) for detail in details])
    metadata = ((_DETAILS_KEY, status.SerializeToString()),)
    await context.abort(code, message, trailing_metadata=metadata)
    raise AssertionError("abort always raises")


async def abort_malformed(context: grpc.aio.ServicerContext, name: str) -> NoReturn:
    """End an RPC whose message cannot be parsed."""
    message = f"the message is no valid {name}: it is cut short, or a text in it is not UTF-8"
    await abort(context, InvalidRequestError.of("", message))


async def abort_internal(context: grpc.aio.ServicerContext) -> NoReturn:
    """End an RPC that met a fault of the server itself."""
    await abort(context, EngineError("the server met a fault of its own; its log says which"))


def _details(error: TreadleError) -> list[Message]:
    if isinstance(error, InvalidRequestError):
        violations = [
            error_details_pb2.BadRequest.FieldViolation(
                field=v.field, description=v.message[:_MAX_MESSAGE_LENGTH]
            )
            for v in error.violations[:_MAX_VIOLATIONS]
        ]
        return [error_details_pb2.BadRequest(field_violations=violations)]
    if isinstance(error, QueueFullError):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]
    return []


def _pack(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
