"""The gateway of a cluster: the application of `gateway/` in front of replicas instead of one worker."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from carrel.cluster.census import Census, ClusterMetrics
from carrel.cluster.client import ClusterWorkerClient
from carrel.cluster.fleet import Fleet
from carrel.cluster.options import gateway_config, read_arguments
from carrel.cluster.routing import Routing
from carrel.process.tracing import make_tracer
from gateway.errors import ConfigError
from gateway.rest.app import create_app
from gateway.rpc.server import ChatServer
from gateway.server import CLOSE_TIMEOUT_S, create_service, load

PORT_RETRY_S = 1.0

log = logging.getLogger(__name__)


@serve.ingress()
class Gateway:
    """A Serve deployment, the application's ingress."""

    async def __init__(self, replicas: DeploymentHandle[Any], arguments: dict[str, Any]) -> None:  # type: ignore[misc]
        options = read_arguments(arguments).options
        self._config = gateway_config(options, os.environ)
        tokenizer, defaults = await asyncio.to_thread(load, self._config)
        routing = Routing(options.max_requests, options.affinity)
        fleet = Fleet(replicas)
        census = Census(fleet, routing.forget)
        client = ClusterWorkerClient(fleet, census, routing)
        metrics = ClusterMetrics(census, routing)
        self._tracer = make_tracer("gateway", self._config.otlp_endpoint)
        self._service = create_service(
            self._config, client, tokenizer, defaults, self._tracer, metrics.render
        )
        self._chat: ChatServer | None = None
        self._tasks = [asyncio.create_task(census.keep_taking())]
        if self._config.grpc_port:
            self._tasks.append(asyncio.create_task(self._serve_chat()))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._config, self._service)

    async def __del__(self) -> None:
        # Serve calls it when all its own requests are done; those of chat gRPC are counted by admission alone
        if not hasattr(self, "_tasks"):
            return
        if not await self._service.admission.drain(self._config.shutdown_timeout_s, asyncio.Event()):
            self._service.admission.cut_off()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._chat is not None:
            await self._chat.stop(CLOSE_TIMEOUT_S)
        await asyncio.to_thread(self._tracer.close)

    async def _serve_chat(self) -> None:
        """Listen as soon as the port is free: in an update the gateway before this one may still drain."""
        while self._chat is None:
            try:
                chat = ChatServer(self._config, self._service)
            except ConfigError as exc:
                log.warning("%s", exc)
                await asyncio.sleep(PORT_RETRY_S)
            else:
                self._chat = chat
                await chat.start()
