"""The chat gRPC server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from carrel.process.noted_errors import NotedErrors
from gateway.auth import KeyRing
from gateway.config import GatewayConfig
from gateway.errors import ConfigError, Unauthorized
from gateway.metrics import Metrics
from gateway.rpc.messages import MAX_MESSAGE_BYTES, MessageInterceptor, abort, shown_key
from gateway.rpc.servicer import ChatServicer
from gateway.service import ChatService
from gateway.v1 import chat_pb2, chat_pb2_grpc

HEALTH_PREFIX = "/grpc.health.v1.Health/"


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a key in `authorization`. Only health is open."""

    def __init__(self, keys: KeyRing, metrics: Metrics) -> None:
        self._keys = keys

        async def refuse(messages: Any, context: grpc.aio.ServicerContext) -> None:
            metrics.count_rejected(error := Unauthorized())
            await abort(context, error)

        # one of a stream waits for no message
        self._refusal = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        is_open = handler_call_details.method.startswith(HEALTH_PREFIX)
        if is_open or self._keys.caller(shown_key(handler_call_details.invocation_metadata)) is not None:
            return await continuation(handler_call_details)
        return self._refusal


CHAT_SERVICE = chat_pb2.DESCRIPTOR.services_by_name["Chat"]
CHAT = CHAT_SERVICE.full_name
HEALTH_INTERVAL_S = 2.0
# streams of health at once, which need no key
MAX_WATCHES = 64
# a connection without a call is closed after this, and one whose client does not answer is found
IDLE_MS = 60_000

log = logging.getLogger(__name__)


class BoundedHealth(health.aio.HealthServicer):  # type: ignore[name-defined]
    """gRPC's, with at most `MAX_WATCHES` streams at once."""

    def __init__(self) -> None:
        super().__init__()
        self._num_watches = 0

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        if self._num_watches >= MAX_WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHES} watch already: use Check."
            )
        self._num_watches += 1
        try:
            await super().Watch(request, context)
        finally:
            self._num_watches -= 1


class ChatServer:
    """Chat, health and reflection on one port; must be built inside the event loop. `port` is the bound one.

    Raises ConfigError when the port is taken.
    """

    def __init__(self, config: GatewayConfig, service: ChatService) -> None:
        self._service = service
        keys = service.keys
        self._server = grpc.aio.server(
            interceptors=[
                AuthInterceptor(keys, service.metrics),
                MessageInterceptor(CHAT_SERVICE, keys, service.bodies),
            ],
            options=[
                ("grpc.so_reuseport", 0),
                (
                    "grpc.max_receive_message_length",
                    min(config.max_body_bytes or MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
                ),
                # of one connection; the last of them are told that the server is full
                ("grpc.max_concurrent_streams", config.max_concurrent + MAX_WATCHES),
                # what comes before a message is asked for is 64 KiB of a call, and not as much as the network carries
                ("grpc.http2.bdp_probe", 0),
                ("grpc.max_allowed_incoming_connections", config.grpc_connection_limit),
                ("grpc.server_handshake_timeout_ms", round(min(config.header_timeout_s, 3600.0) * 1000)),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.keepalive_time_ms", IDLE_MS),
            ],
        )
        chat_pb2_grpc.add_ChatServicer_to_server(
            ChatServicer(service, keys, config.write_timeout_s), self._server
        )
        self._health = BoundedHealth()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (CHAT, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        try:
            if (tls := _credentials(config)) is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, tls)
        except RuntimeError as exc:
            raise ConfigError(
                f"cannot listen on {address}: choose another port with --grpc-port, 0 for none"
            ) from exc
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._set_serving(await self._is_ready())
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_health())

    async def stop(self, grace_s: float) -> None:
        """Health says NOT_SERVING first; running calls get `grace_s`."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._set_serving(False)
        await self._server.stop(grace_s)

    async def _watch_health(self) -> None:
        errors = NotedErrors(log, "looking whether this server is ready")
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            with errors.noting():
                await self._set_serving(await self._is_ready())

    async def _is_ready(self) -> bool:
        return await self._service.status.why_not_ready() is None

    async def _set_serving(self, is_serving: bool) -> None:
        known = health_pb2.HealthCheckResponse
        for name in ("", CHAT):
            await self._health.set(name, known.SERVING if is_serving else known.NOT_SERVING)


def _credentials(config: GatewayConfig) -> grpc.ServerCredentials | None:
    if config.ssl_keyfile is None or config.ssl_certfile is None:
        return None
    return grpc.ssl_server_credentials([(config.ssl_keyfile.read_bytes(), config.ssl_certfile.read_bytes())])
