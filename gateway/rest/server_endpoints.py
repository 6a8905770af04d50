"""Routes about the server: how it is, what it serves, and how much it has to do."""

from __future__ import annotations

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST

from carrel.process.version import version
from gateway.errors import NoEmbeddings, WorkerUnavailable
from gateway.rest.answers import LoadAnswer, ServerInfoAnswer, ServerLimits, StatusAnswer, VersionAnswer
from gateway.rest.bounded import BoundedRouter
from gateway.rest.dependencies import ERRORS, KEY, Config, Service

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
METRICS = {"description": "the metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}

open_router = BoundedRouter(responses=ERRORS)
router = BoundedRouter(dependencies=KEY, responses=ERRORS)


@open_router.get("/health")
async def health(service: Service) -> StatusAnswer:
    """Liveness: 200 while the worker answers."""
    if await service.status.is_alive():
        return StatusAnswer(status="ok")
    raise WorkerUnavailable()


@open_router.get("/ready")
async def ready(service: Service) -> StatusAnswer:
    """Readiness: 200 when a request would be served now."""
    if (error := await service.status.why_not_ready()) is None:
        return StatusAnswer(status="ready")
    raise error


@router.get("/version")
async def show_version() -> VersionAnswer:
    """Carrel's version."""
    return VersionAnswer(version=version())


@router.get("/server_info")
async def server_info(service: Service, config: Config) -> ServerInfoAnswer:
    """The model that is served, its device, and its limits."""
    info = await service.status.info()
    limits = ServerLimits(
        max_concurrent=config.max_concurrent,
        max_concurrent_per_key=config.max_per_key(service.keys.num_keys),
        max_body_bytes=(await service.bodies.now()).max_bytes,
        request_timeout_seconds=config.request_timeout_s,
    )
    return ServerInfoAnswer(
        version=version(),
        names=list(service.model_names),
        policies=list(info.policies),
        default_budget=info.default_budget.share or info.default_budget.tokens or None,
        limits=limits,
        **{name: getattr(info, name) for name in INFO_FIELDS},
    )


@router.get("/load")
async def load(service: Service) -> LoadAnswer:
    """Requests and tokens that run and wait, for who spreads requests over servers."""
    if (stats := await service.status.stats()) is None:
        raise WorkerUnavailable()
    counts = {name: getattr(stats, name) for name in LoadAnswer.model_fields if name != "requests"}
    return LoadAnswer(requests=service.admission.num_running, **counts)


@router.get("/metrics", response_class=Response, responses={200: METRICS})
async def metrics(service: Service) -> Response:
    """Prometheus text: the gateway's metrics, and the worker's counters."""
    return Response(await service.render_metrics(), media_type=CONTENT_TYPE_LATEST)


@router.post("/v1/embeddings")
async def embeddings() -> Response:
    """Refused: the model generates text."""
    raise NoEmbeddings()
