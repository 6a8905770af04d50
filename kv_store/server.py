"""Wires the store's parts to a gRPC server; the one place where they meet."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from carrel.process.noted_errors import NotedErrors
from carrel.process.options import OptionError
from carrel.process.ready_threads import ReadyThreads, start_thread
from carrel.process.tracing import Tracer, make_tracer
from kv_store.arena import Arena, HandoffServer, claim_socket_path
from kv_store.client.rpc import TOKEN_KEY, token_metadata
from kv_store.config import StoreConfig, idle_cores
from kv_store.disk.folder import TierFolder, take_folder
from kv_store.disk.tier import DiskTier
from kv_store.errors import ConfigError
from kv_store.index import IterationBound
from kv_store.indexes import IndexBuilder
from kv_store.memory import check_room
from kv_store.servicer import KVStoreServicer
from kv_store.state import StoreState
from kv_store.store import Store
from kv_store.trainers import make_trainers
from kv_store.v1 import kv_store_pb2 as pb
from kv_store.v1 import kv_store_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["KVStore"].full_name
_STOP_GRACE_SECONDS = 2.0

_log = logging.getLogger(__name__)


class StoreServer:
    """A running store: serving when constructed, until `close`.

    Raises ConfigError when the arena, a socket, threads or the trainers cannot be had; nothing is left then.
    """

    def __init__(
        self,
        config: StoreConfig,
        tracer: Tracer | None = None,
        take_folder: Callable[[Path], TierFolder] = take_folder,
    ) -> None:
        """tracer: takes spans of calls, and is the caller's to close; None: as the configuration says. take_folder: the
        disk tier's, of `--kv-store-path`."""
        self.config = config
        with _raising_config_errors(), contextlib.ExitStack() as stack:
            if tracer is None:
                tracer = make_tracer("kv_store", config.otlp_endpoint)
                stack.callback(tracer.close)
            self._prepare_folders()
            check_room(config.arena_bytes, config.slab_bytes)
            arena = Arena(config.arena_bytes)
            stack.callback(arena.close)
            if config.arena_socket:
                stack.callback(HandoffServer(arena, config.arena_socket).close)
            trainers = make_trainers(config.runtime, arena, config.num_trainers, config.arena_socket)
            stack.callback(trainers.close)
            state = StoreState(
                arena,
                config.slab_bytes,
                config.lease_seconds,
                time.monotonic,
                # 8 of an H200's 16 were as fast as 15, and a first token waits for other threads too.
                max(1, idle_cores() // 2),
            )
            stack.callback(state.close)
            tier = None
            if config.kv_store_path is not None:
                folder = take_folder(config.kv_store_path)
                tier = DiskTier(state, folder, config.kv_store_disk_bytes)
                stack.callback(tier.close)
            self.store = Store(state, tier)
            self._start_reaper(stack)
            bound = IterationBound(config.default_iterations, config.num_trainers)
            builder = IndexBuilder(state, trainers, bound, config.max_points_per_centroid)
            servicer = KVStoreServicer(config, state, self.store, builder, tracer)
            self._start_serving(stack, servicer)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Say NOT_SERVING, finish what runs within 2 s, then give everything back."""
        self._stack.close()

    def _prepare_folders(self) -> None:
        for path in filter(None, (self.config.arena_socket, str(self.config.socket_path or ""))):
            try:
                os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o700, exist_ok=True)
            except OSError as exc:
                raise ConfigError(f"the folder of socket {path} cannot be made: {exc}") from exc

    def _bind(self, server: grpc.Server, address: str) -> int:
        key, certificate = self.config.store_ssl_keyfile, self.config.store_ssl_certfile
        if key is None or certificate is None:
            return server.add_insecure_port(address)
        pair = (key.read_bytes(), certificate.read_bytes())
        return server.add_secure_port(address, grpc.ssl_server_credentials([pair]))

    def _start_reaper(self, stack: contextlib.ExitStack) -> None:
        closing, errors = threading.Event(), NotedErrors(_log, "looking for leases that are over")

        def reap() -> None:
            while not closing.wait(self.config.lease_seconds / 4):
                with errors.noting():
                    self.store.reap()

        thread = start_thread(reap, "lease-reaper")
        stack.callback(thread.join, 5.0)
        stack.callback(closing.set)

    def _start_serving(self, stack: contextlib.ExitStack, servicer: KVStoreServicer) -> None:
        config = self.config
        threads = ReadyThreads(config.num_call_threads + config.max_pending_builds, "call")
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        server = grpc.server(
            threads,
            interceptors=[TokenCheck(config.store_token)] if config.store_token else None,
            options=(
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
                ("grpc.so_reuseport", 0),
            ),
        )
        health_servicer = health.HealthServicer()
        kv_store_pb2_grpc.add_KVStoreServicer_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        path = config.socket_path
        if path is not None:
            claim_socket_path(str(path))
        address = config.listen if path is None else f"unix:{path}"
        try:
            self.port = self._bind(server, address)
        except RuntimeError as exc:
            raise ConfigError(f"--listen {config.listen}: the address cannot be used") from exc
        if path is not None:
            os.chmod(path, 0o600)
            stack.callback(path.unlink, missing_ok=True)
        server.start()
        stack.callback(lambda: server.stop(_STOP_GRACE_SECONDS).wait(_STOP_GRACE_SECONDS + 5.0))
        stack.callback(health_servicer.enter_graceful_shutdown)
        for name in ("", SERVICE_NAME):
            health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)


@contextlib.contextmanager
def _raising_config_errors() -> Iterator[None]:
    """Turn other errors of options, as of threads and tracing, into the store's."""
    try:
        yield
    except OptionError as exc:
        raise ConfigError(str(exc)) from exc


class TokenCheck(grpc.ServerInterceptor):
    """Refuses every call without the token, but those that ask for the store's health."""

    def __init__(self, token: str) -> None:
        ((_, shown),) = token_metadata(token)
        self._expected = shown.encode()
        self._refuse = grpc.unary_unary_rpc_method_handler(_refuse)

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], call: grpc.HandlerCallDetails
    ) -> Any:
        shown = dict(call.invocation_metadata).get(TOKEN_KEY, "")
        shown = shown.encode() if isinstance(shown, str) else shown
        is_health = call.method.startswith(f"/{health.SERVICE_NAME}/")
        if is_health or hmac.compare_digest(shown, self._expected):
            return continuation(call)
        return self._refuse


def _refuse(request: object, context: grpc.ServicerContext) -> None:
    context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "wrong token, or none: give the store and its workers the same CARREL_STORE_TOKEN or --store-token-file",
    )
