"""What the server says of itself: whether it lives and is ready, what it is, and how much it has to do."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from carrel.process.version import version
from gateway.config import GatewayConfig
from gateway.errors import NoEmbeddings, WorkerUnavailable
from gateway.rest.answers import LoadAnswer, ServerInfoAnswer, ServerLimits, StatusAnswer, VersionAnswer
from gateway.rest.documentation import Operation
from gateway.rest.errors import error_response
from gateway.rest.schemas import EmbeddingsBody
from gateway.service import ChatService

# of the worker's own account, by the same names
INFO_FIELDS = (
    "model",
    "model_type",
    "device",
    "dtype",
    "num_parameters",
    "vocab_size",
    "max_model_len",
    "max_num_seqs",
    "slot_capacity_tokens",
    "transport",
    "default_policy",
)


class ServerEndpoints:
    """The handlers, as methods over one service."""

    def __init__(self, config: GatewayConfig, service: ChatService) -> None:
        self._config = config
        self._service = service

    def operations(self) -> tuple[Operation, ...]:
        return (
            Operation("GET", "/health", self.health, answer=StatusAnswer, is_open=True),
            Operation("GET", "/ready", self.ready, answer=StatusAnswer, is_open=True),
            Operation("GET", "/version", self.version, answer=VersionAnswer),
            Operation("GET", "/server_info", self.info, answer=ServerInfoAnswer),
            Operation("GET", "/load", self.load, answer=LoadAnswer),
            Operation("GET", "/metrics", self.metrics, media="text/plain"),
            Operation("POST", "/v1/embeddings", self.embeddings, EmbeddingsBody),
        )

    async def health(self, request: Request) -> Response:
        """Liveness: 200 while the worker answers."""
        if await self._service.status.is_alive():
            return JSONResponse({"status": "ok"})
        return error_response(WorkerUnavailable())

    async def ready(self, request: Request) -> Response:
        """Readiness: 200 when a request would be served now."""
        if (error := await self._service.status.why_not_ready()) is None:
            return JSONResponse({"status": "ready"})
        return error_response(error)

    async def version(self, request: Request) -> Response:
        """Carrel's version."""
        return JSONResponse({"version": version()})

    async def info(self, request: Request) -> Response:
        """What is served, on what, and within which limits."""
        info, config = await self._service.status.info(), self._config
        limits = ServerLimits(
            max_concurrent=config.max_concurrent,
            max_concurrent_per_key=config.max_per_key(self._service.keys.num_keys),
            max_body_bytes=(await self._service.bodies.now()).max_bytes,
            request_timeout_seconds=config.request_timeout_s,
        )
        answer = ServerInfoAnswer(
            version=version(),
            names=list(self._service.model_names),
            policies=list(info.policies),
            default_budget=info.default_budget.share or info.default_budget.tokens or None,
            limits=limits,
            **{name: getattr(info, name) for name in INFO_FIELDS},
        )
        return JSONResponse(answer.model_dump())

    async def load(self, request: Request) -> Response:
        """Requests and tokens that run and wait, for who spreads requests over servers."""
        if (stats := await self._service.status.stats()) is None:
            raise WorkerUnavailable()
        counts = {name: getattr(stats, name) for name in LoadAnswer.model_fields if name != "requests"}
        answer = LoadAnswer(requests=self._service.admission.num_running, **counts)
        return JSONResponse(answer.model_dump())

    async def metrics(self, request: Request) -> Response:
        """Prometheus text: the gateway's metrics, and the worker's counters."""
        return Response(await self._service.render_metrics(), media_type=CONTENT_TYPE_LATEST)

    async def embeddings(self, request: Request) -> Response:
        """Refused: the model generates text."""
        raise NoEmbeddings()
