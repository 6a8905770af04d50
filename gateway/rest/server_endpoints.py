"""Routes about the server: health, models' facts, load, metrics and the pages."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.routing import Route

from carrel.process.version import version
from gateway.errors import NoEmbeddings, WorkerUnavailable
from gateway.rest.answers import LoadAnswer, ServerInfoAnswer, ServerLimits, StatusAnswer, VersionAnswer
from gateway.rest.bounded import ERRORS, KEY, BoundedRouter, Config, Service

PATH, DOCS_PATH = "/", "/docs"
_FOLDER = Path(__file__).resolve().parents[1] / "page"
FILE, DOCS_FILE = _FOLDER / "index.html", _FOLDER / "docs.html"


def page_route(path: str = PATH, file: Path = FILE) -> Route:
    """Shows a page to everybody: it holds nothing of anybody's, and asks for a key where the API wants one."""
    text = file.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy_of(text),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }

    async def show(request: Request) -> Response:
        return HTMLResponse(text, headers=headers)

    return Route(path, show)


def policy_of(text: str) -> str:
    """Return the page's content security policy: its own script and style, by their hashes, and its own server."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hash(text: str, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


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
    "context_capacity",
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
