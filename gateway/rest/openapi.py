"""The bodies in /openapi.json: the handlers read them by hand, so FastAPI does not see their types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI

from gateway.rest.schemas import Body

_REF = "#/components/schemas/{model}"


def json_body(kind: type[Body]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads this body."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_schemas(app: FastAPI, kinds: Sequence[type[Body]]) -> None:
    """Let the app's OpenAPI document define the bodies."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        document = build()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for kind in kinds:
            schema = kind.model_json_schema(ref_template=_REF)
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        return document

    app.openapi = openapi  # type: ignore[method-assign]
