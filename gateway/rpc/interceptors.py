"""What happens to every call before its method is looked up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from gateway.auth import KeyRing
from gateway.errors import Unauthorized
from gateway.rpc.errors import abort

HEALTH_PREFIX = "/grpc.health.v1.Health/"


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a key in `authorization`. Only health is open."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

        async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
            await abort(context, Unauthorized())

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        metadata: dict[str, str] = dict(handler_call_details.invocation_metadata or ())  # type: ignore[arg-type]
        is_open = handler_call_details.method.startswith(HEALTH_PREFIX)
        if is_open or self._keys.caller(metadata.get("authorization")) is not None:
            return await continuation(handler_call_details)
        return self._refusal
