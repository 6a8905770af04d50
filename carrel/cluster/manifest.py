"""The application as a Serve configuration, for `serve run` and `serve deploy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BUILDER = "carrel.cluster.app:build"


@dataclass(frozen=True)
class Place:
    """The application's name, and where Serve's proxies listen for it."""

    name: str
    host: str
    port: int
    proxies: str


def manifest(place: Place, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `ray.serve.schema.ServeDeploySchema` reads."""
    return {
        "proxy_location": place.proxies,
        "http_options": {"host": place.host, "port": place.port},
        "applications": [
            {"name": place.name, "route_prefix": "/", "import_path": BUILDER, "args": dict(arguments)}
        ],
    }
