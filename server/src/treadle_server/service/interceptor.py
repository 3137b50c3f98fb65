"""One place through which every RPC goes: it asks who calls, parses the message and turns errors into statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from treadle_server.errors import NotSupportedError, TreadleError
from treadle_server.service.active_requests import ActiveRequests
from treadle_server.service.message_size import check_entries
from treadle_server.service.observability.telemetry import Telemetry
from treadle_server.service.security.permissions import is_open
from treadle_server.service.security.server_security import ServerSecurity, address_name
from treadle_server.service.status import abort, abort_internal, abort_malformed, reason_of_status

_LOG = logging.getLogger(__name__)
_OUR_SERVICES: Final = "/treadle_protos."
# Messages of this many bytes are parsed off the event loop, one at a time: many small entries take long, and health
# checks and streams would wait.
_MANY_BYTES: Final = 32 << 10


class RequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc] # grpc ships no types
    """Lets nobody in who may not come in, and nothing of a message before that.

    It takes raw bytes and parses them itself: gRPC would answer a malformed message with INTERNAL. To gRPC every
    handler takes a stream: the only message of another one it reads before it calls it, 16 MB from anyone at all.
    """

    def __init__(
        self, active: ActiveRequests, security: ServerSecurity, telemetry: Telemetry, max_request_entries: int
    ) -> None:
        self._active = active
        self._security = security
        self._telemetry = telemetry
        self._max_request_entries = max_request_entries
        self._parsing = asyncio.Lock()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap the handlers of treadle's own services, guard reflection, and let anyone ask for health."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return handler
        if is_open(method):
            return self._open(handler)
        if not method.startswith(_OUR_SERVICES):
            return self._guarded(handler, method)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._stream(handler, method), response_serializer=handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            self._unary(handler, method), response_serializer=handler.response_serializer
        )

    def _unary(
        self, handler: grpc.RpcMethodHandler, method: str
    ) -> Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[Any]]:
        async def call(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            async with self._admitted(method, context):
                return await handler.unary_unary(await self._request(handler, context), context)

        return call

    def _stream(
        self, handler: grpc.RpcMethodHandler, method: str
    ) -> Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]]:
        async def call(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            async with self._admitted(method, context):
                request = await self._request(handler, context)
                async with aclosing(handler.unary_stream(request, context)) as responses:
                    async for response in responses:
                        await context.write(response)  # as gRPC does with what a generator yields

        return call

    def _open(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Return health's handler, for anyone; it answers, or writes to the context."""

        async def call(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
            try:
                return await behaviour(await self._request(handler, context), context)
            except NotImplementedError:  # gRPC's servicer lacks Health.List, and gRPC would log a traceback for it
                await abort(context, NotSupportedError("health is checked and watched, a service at a time"))

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(call, response_serializer=handler.response_serializer)

    def _guarded(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        """Return reflection's handler, for those who may call it."""

        async def call(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with self._admitted(method, context):
                async for response in handler.stream_stream(requests, context):
                    yield response

        return grpc.stream_stream_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)

    @asynccontextmanager
    async def _admitted(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Let a caller in who may call the method, watch the request, and turn errors into statuses."""
        with self._telemetry.watch(method, context) as call:
            try:
                call.client = address_name(context.peer())  # of a caller that cannot be told, the log has this
                caller = self._security.identify(context)
                call.client, call.role = caller.name, caller.role
                self._security.authorise(method, caller)
                with self._security.place_for(caller), self._active:
                    yield
            except TreadleError as error:
                call.failed(error, reason_of_status(error))
                await abort(context, call.naming_weights(error))
            except (grpc.aio.AbortError, grpc.aio.BaseError):
                raise
            except Exception:  # noqa: BLE001 - a fault of ours fails this RPC alone
                _LOG.exception("an RPC failed")
                await abort_internal(context)

    async def _request(self, handler: grpc.RpcMethodHandler, context: grpc.aio.ServicerContext) -> Any:
        """Read and parse the only message of an RPC."""
        raw = await context.read()
        owner = getattr(handler.request_deserializer, "__self__", None)
        name = getattr(owner, "__name__", "message")
        if raw is grpc.aio.EOF:
            await abort_malformed(context, name)
        try:
            if len(raw) < _MANY_BYTES:
                return self._parse(handler, raw)
            async with self._parsing:
                return await asyncio.to_thread(self._parse, handler, raw)
        except DecodeError:
            await abort_malformed(context, name)

    def _parse(self, handler: grpc.RpcMethodHandler, raw: bytes) -> Any:
        request = handler.request_deserializer(raw)
        check_entries(request, self._max_request_entries)
        return request
