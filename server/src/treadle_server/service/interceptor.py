"""One place through which every RPC of treadle goes: it parses the message and turns errors into statuses."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from treadle_server.errors import TreadleError
from treadle_server.service.active_requests import ActiveRequests
from treadle_server.service.status import abort, abort_internal, abort_malformed

_LOG = logging.getLogger(__name__)
_OUR_SERVICES = "/treadle_protos."


class RequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc] # grpc ships no types
    """Takes raw bytes and parses them itself: gRPC would answer a malformed message with INTERNAL."""

    def __init__(self, active: ActiveRequests) -> None:
        self._active = active

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap the handlers of treadle's own services; leave health and reflection as they are."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OUR_SERVICES):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler, self._active), response_serializer=handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            _unary(handler, self._active), response_serializer=handler.response_serializer
        )


def _unary(
    handler: grpc.RpcMethodHandler, active: ActiveRequests
) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[Any]]:
    async def call(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
        request = await _parse(handler, raw, context)
        try:
            with active:
                return await handler.unary_unary(request, context)
        except TreadleError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:  # noqa: BLE001 - a fault of ours fails this RPC alone
            _LOG.exception("an RPC failed")
            await abort_internal(context)

    return call


def _stream(
    handler: grpc.RpcMethodHandler, active: ActiveRequests
) -> Callable[[bytes, grpc.aio.ServicerContext], AsyncIterator[Any]]:
    async def call(raw: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        request = await _parse(handler, raw, context)
        try:
            with active:
                async with aclosing(handler.unary_stream(request, context)) as responses:
                    async for response in responses:
                        yield response
        except TreadleError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:  # noqa: BLE001 - a fault of ours fails this RPC alone
            _LOG.exception("an RPC failed")
            await abort_internal(context)

    return call


async def _parse(handler: grpc.RpcMethodHandler, raw: bytes, context: grpc.aio.ServicerContext) -> Any:
    try:
        return handler.request_deserializer(raw)
    except DecodeError:
        owner = getattr(handler.request_deserializer, "__self__", None)
        await abort_malformed(context, getattr(owner, "__name__", "message"))
