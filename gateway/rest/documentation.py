"""What the API says of itself: /openapi.json, and the page that shows it at /docs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from carrel.process.version import version
from gateway.rest.answers import ErrorAnswer
from gateway.rest.page import page_route
from gateway.rest.schemas import Body

SCHEMAS = "#/components/schemas/{model}"
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
PAGE = Path(__file__).resolve().parents[1] / "page" / "docs.html"
DOCS_PATH = "/docs"


@dataclass(frozen=True, slots=True)
class Operation:
    """A route of the API. `body`: what a POST takes; `answer`: what comes back, where it is typed, else it is `media`;
    `streams`: as server-sent events where it is asked for; `is_open`: no key is asked for; the handler's docstring says
    what it does."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    body: type[Body] | None = None
    answer: type[Body] | None = None
    media: str = "application/json"
    streams: bool = False
    is_open: bool = False

    @property
    def route(self) -> Route:
        return Route(self.path, self.handler, methods=[self.method])


def documentation(operations: Sequence[Operation], root_path: str = "") -> list[Route]:
    """The two routes that show these."""
    document = openapi(operations) | ({"servers": [{"url": root_path}]} if root_path else {})

    written = bytes(JSONResponse(document).body)

    async def show_document(request: Request) -> Response:
        return Response(written, media_type=JSONResponse.media_type)

    return [Route("/openapi.json", show_document), page_route(DOCS_PATH, PAGE)]


def openapi(operations: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI document of these operations."""
    models = (ErrorAnswer, *(model for each in operations for model in (each.body, each.answer)))
    bodies = [(model, "validation") for model in models if model is not None]
    _, schemas = models_json_schema(bodies, ref_template=SCHEMAS)  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        # Starlette's converters, such as {model_id:path}, are not OpenAPI's
        path = re.sub(r":\w+}", "}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _describe(each, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Carrel", "version": version()},
        "security": [{name: []} for name in SECURITY],
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": SECURITY},
    }


def _describe(operation: Operation, path: str) -> dict[str, Any]:
    answer = {operation.media: _schema(operation.answer) if operation.answer is not None else {}}
    if operation.streams:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"description": "why not", "content": {"application/json": _schema(ErrorAnswer)}}
    described: dict[str, Any] = {
        "summary": inspect.getdoc(operation.handler),
        "operationId": f"{operation.method.lower()}{re.sub(r'[^a-z]+', '_', path)}".rstrip("_"),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", path)
        ],
        "responses": {"200": {"description": "the answer", "content": answer}, "4XX": error, "5XX": error},
    }
    if operation.body is not None:
        content = {"application/json": _schema(operation.body)}
        described["requestBody"] = {"required": True, "content": content}
    if operation.is_open:
        described["security"] = []
    return described


def _schema(model: type[Body]) -> dict[str, Any]:
    return {"schema": {"$ref": SCHEMAS.format(model=model.__name__)}}
