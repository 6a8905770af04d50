"""The worker's gRPC server: service, health and reflection on one address."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from carrel.process.certificates import Identity
from gpu_worker.errors import ConfigError
from gpu_worker.grammar import Grammars
from gpu_worker.service.engine_thread import EngineThread
from gpu_worker.service.event_stream import MAX_PENDING_EVENTS
from gpu_worker.service.interceptor import BoundaryInterceptor
from gpu_worker.service.servicer import GPUWorkerServicer
from gpu_worker.store.sessions import Sessions
from gpu_worker.store.traces import Traces
from gpu_worker.v1 import gpu_worker_pb2, gpu_worker_pb2_grpc

SERVICE = gpu_worker_pb2.DESCRIPTOR.services_by_name["GPUWorker"].full_name
_OVERALL = ""
_MIN_MESSAGE_BYTES = 4 * 2**20
# a token id as a varint
_MAX_TOKEN_ID_BYTES = 5


class WorkerServer:
    """A grpc.aio server on `listen`; health is SERVING from `start` to `stop_serving`."""

    def __init__(
        self,
        engine: EngineThread,
        sessions: Sessions,
        listen: str,
        max_pending: int = MAX_PENDING_EVENTS,
        grammars: Grammars | None = None,
        identity: Identity | None = None,
        traces: Traces | None = None,
    ) -> None:
        """grammars: of the engine's model, and ended with this; None: made here.
        identity: with it only TLS clients with a certificate that it knows are served.
        traces: by which the engine's store client knows those of running requests; None: it does not.
        """
        info = engine.info
        self._grammars = grammars or Grammars(info.model, info.eos_token_ids)
        self._listen = listen
        self._identity = identity
        self._is_bound = False
        # typed Any: stubs of grpc_health, where installed, leave its aio part out
        module: Any = health
        self._health = module.aio.HealthServicer()
        max_prompt_bytes = _MAX_TOKEN_ID_BYTES * info.max_model_len
        self._server = grpc.aio.server(
            interceptors=(BoundaryInterceptor(SERVICE),),
            options=(
                ("grpc.max_receive_message_length", _MIN_MESSAGE_BYTES + max_prompt_bytes),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ),
        )
        servicer = GPUWorkerServicer(engine, sessions, self._grammars, traces or Traces(), max_pending)
        gpu_worker_pb2_grpc.add_GPUWorkerServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Listen and answer. Raises ConfigError when the address cannot be bound."""
        try:
            self._bind()
        except RuntimeError as error:
            raise ConfigError(
                f"--listen {self._listen!r} cannot be bound; choose another address."
            ) from error
        self._is_bound = True
        if path := _socket_path(self._listen):
            path.chmod(0o600)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    def _bind(self) -> None:
        if (own := self._identity) is None:
            self._server.add_insecure_port(self._listen)
            return
        pairs = [(own.key, own.certificate)]
        credentials = grpc.ssl_server_credentials(pairs, own.root, require_client_auth=True)
        self._server.add_secure_port(self._listen, credentials)

    async def stop_serving(self) -> None:
        """Report NOT_SERVING; running calls go on."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, cancel those that outlive the grace, free the address."""
        await self.stop_serving()
        await self._server.stop(grace_seconds)
        self._grammars.close()
        if self._is_bound and (path := _socket_path(self._listen)):
            path.unlink(missing_ok=True)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        await self._health.set(_OVERALL, status)
        await self._health.set(SERVICE, status)


def prepare_address(listen: str) -> None:
    """Make a Unix socket's folder, mode 0700, and check that no process answers at the address.

    gRPC would take over a Unix socket that another process still serves. Raises ConfigError.
    """
    path = _socket_path(listen)
    try:
        if path is None:
            host, _, port = listen.rpartition(":")
            family, kind, _, _, address = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )[0]
        else:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.exists() and not path.is_socket():
                raise ConfigError(f"--listen {listen!r} names a file that is no socket; choose another path.")
            family, kind, address = socket.AF_UNIX, socket.SOCK_STREAM, str(path)  # type: ignore[assignment]
        with socket.socket(family, kind) as probe:
            probe.settimeout(1.0)
            is_taken = probe.connect_ex(address) == 0
    except OSError as error:
        raise ConfigError(f"--listen {listen!r} cannot be used: {error.strerror or error}.") from error
    if is_taken:
        raise ConfigError(
            f"--listen {listen!r} is served by another process; stop it or choose another address."
        )


def _socket_path(listen: str) -> Path | None:
    scheme, _, path = listen.partition(":")
    return Path(os.path.abspath(path)) if scheme == "unix" else None
