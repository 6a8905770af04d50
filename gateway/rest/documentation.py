"""What the API says of itself: /openapi.json, and the page that shows it at /docs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from carrel.process.version import version
from gateway.rest.schemas import Body

SCHEMAS = "#/components/schemas/{model}"
SWAGGER = "https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui"
PAGE = f"""<!DOCTYPE html>
<html>
<head><title>Carrel</title><link rel="stylesheet" href="{SWAGGER}.css"></head>
<body>
<div id="docs"></div>
<script src="{SWAGGER}-bundle.js"></script>
<script>SwaggerUIBundle({{url: "openapi.json", dom_id: "#docs"}})</script>
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Operation:
    """A route of the API. `body`: what a POST takes; `answer`: what comes back, where it is typed; the handler's
    docstring says what it does."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    body: type[Body] | None = None
    answer: type[Body] | None = None

    @property
    def route(self) -> Route:
        return Route(self.path, self.handler, methods=[self.method])


def documentation(operations: Sequence[Operation], root_path: str = "") -> list[Route]:
    """The two routes that show these."""
    document = openapi(operations) | ({"servers": [{"url": root_path}]} if root_path else {})

    async def show_document(request: Request) -> Response:
        return JSONResponse(document)

    async def show_page(request: Request) -> Response:
        return HTMLResponse(PAGE)

    return [Route("/openapi.json", show_document), Route("/docs", show_page)]


def openapi(operations: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI document of these operations."""
    models = (model for each in operations for model in (each.body, each.answer))
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
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


def _describe(operation: Operation, path: str) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": inspect.getdoc(operation.handler),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", path)
        ],
        "responses": {"200": {"description": "the answer"}},
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.body)}
    if operation.answer is not None:
        described["responses"]["200"]["content"] = _content(operation.answer)
    return described


def _content(model: type[Body]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": SCHEMAS.format(model=model.__name__)}}}
