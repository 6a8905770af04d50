"""Without keys no other site's page is served, whatever name it uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_stack import Stack, running_stack
from starlette.datastructures import Headers
from waiting import PATIENCE

from gateway.config import GatewayConfig
from gateway.errors import Forbidden, InvalidRequest
from gateway.rest.hosts import HostGuard


def refusal(pairs: list[tuple[str, str]], is_host_optional: bool = False, **values: Any) -> str | None:
    """Code of what an open gateway answers to headers of these names and values; None where it serves."""
    guard = HostGuard(GatewayConfig(model="m", worker="unix:w", **values))
    try:
        guard.check(Headers(raw=[(a.encode(), b.encode()) for a, b in pairs]), is_host_optional)
    except (Forbidden, InvalidRequest) as error:
        return error.code
    return None


@pytest.mark.parametrize(
    ("values", "served", "refused"),
    [
        (
            {},
            ["localhost", "LocalHost:8000", "127.0.0.1", "127.9.9.9:80", "[::1]:8000", "[::1]"],
            ["evil.example", "evil.example:8000", "localhost.evil.example", "0.0.0.0", "10.1.2.3", "::1", "",
             "localhost@evil.example", "evil.example#localhost", "localhost:x", "[localhost]"],
        ),
        (
            {"host": "0.0.0.0", "allow_open": True},
            ["10.1.2.3:8000", "0.0.0.0", "[fe80::1]:8000", "localhost"],
            ["evil.example", "gateway:8000"],
        ),
        ({"allowed_hosts": ("Gateway", "my.example")}, ["gateway:8000", "my.example"], ["my.example.evil.example"]),
        ({"allowed_hosts": ("*",)}, ["evil.example", "10.1.2.3"], []),
    ],
)  # fmt: skip
def test_hosts(values: dict[str, Any], served: list[str], refused: list[str]) -> None:
    assert [host for host in served if refusal([("host", host)], **values)] == []
    assert [host for host in refused if refusal([("host", host)], **values) != "host_not_allowed"] == []


def test_a_request_has_one_host() -> None:
    assert refusal([]) == refusal([("host", "localhost")] * 2) == "invalid_host"
    assert refusal([], is_host_optional=True) is None


@pytest.mark.parametrize(
    ("origin", "origins", "is_served"),
    [
        ("http://localhost:8000", (), True),
        # behind a proxy with TLS
        ("https://localhost:8000", (), True),
        ("http://localhost:3000", (), False),
        ("http://localhost:3000", ("http://localhost:3000",), True),
        ("https://evil.example", ("*",), True),
        ("https://evil.example", ("https://good.example",), False),
        ("null", (), False),
        ("file://localhost:8000", (), False),
    ],
)
def test_origins(origin: str, origins: tuple[str, ...], is_served: bool) -> None:
    told = refusal([("host", "localhost:8000"), ("origin", origin)], allowed_origins=origins)
    assert told == (None if is_served else "origin_not_allowed")


def test_every_route_refuses_and_names_the_remedy(http: httpx.Client, stack: Stack) -> None:
    for headers, named, option in (
        ({"Host": "evil.example"}, "'evil.example'", "--allowed-hosts"),
        ({"Origin": "https://evil.example"}, "'https://evil.example'", "--allowed-origins"),
    ):
        for path in ("/health", "/metrics", "/v1/models", "/docs", "/none"):
            answer = http.get(path, headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (403, "PermissionDeniedError")
            assert named in error["message"]
            assert option in error["message"]
        assert http.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 403
    assert stack.script.requests == []
    assert http.get("/health").status_code == 200


def test_with_keys_any_name_is_served_and_health_by_address(locked_stack: Stack) -> None:
    for host in ("10.1.2.3:8000", "evil.example"):
        headers = {"Host": host, "Origin": "https://evil.example"}
        assert httpx.get(f"{locked_stack.url}/health", headers=headers, timeout=PATIENCE).status_code == 200
        headers["Authorization"] = "Bearer right-key"
        assert (
            httpx.get(f"{locked_stack.url}/v1/models", headers=headers, timeout=PATIENCE).status_code == 200
        )


def test_a_unix_socket_has_no_names(tmp_path: Path, model_dir: Path) -> None:
    path = tmp_path / "api.sock"
    with running_stack(tmp_path, model_dir, uds=path):
        way = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=way, base_url="http://anything", timeout=PATIENCE) as client:
            assert client.get("/health").status_code == 200
