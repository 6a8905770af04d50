"""Whom an API without keys serves: a page of another site must not reach it, not even under a name that resolves here.

A browser sends the name in its address bar as `Host`, so that a site whose name was pointed at this machine is known by
it; and the site of the page that asks as `Origin`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.config import GatewayConfig
from gateway.errors import Forbidden, InvalidRequest, ServiceError
from gateway.rest.errors import refusal

ANY = "*"
MAX_SHOWN = 100
# a bracketed address of version 6, or a name or an address of version 4; then a port
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/?#@\[\]]+))(?::\d*)?")


class HostGuard:
    """Which values of `Host` and `Origin` are served.

    Names: localhost, the address that is listened on, and --allowed-hosts. Addresses: those of loopback, and any where
    --allow-open serves more than this machine, since no other site's page is asked for by an address.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._names = {name.strip("[]").lower() for name in ("localhost", config.host, *config.allowed_hosts)}
        self._takes_all = ANY in config.allowed_hosts
        self._takes_addresses = config.allow_open
        self._origins: Collection[str] = config.allowed_origins

    def check(self, headers: Headers, is_host_optional: bool) -> None:
        """Raises InvalidRequest or Forbidden."""
        hosts = headers.getlist("host")
        if len(hosts) > 1 or not (hosts or is_host_optional):
            raise InvalidRequest("A request must have one Host header.", code="invalid_host")
        host = hosts[0] if hosts else ""
        if hosts and not self._serves(host):
            raise Forbidden(
                f"Without an API key this server does not answer to the Host {_shown(host)}: add the name with "
                "--allowed-hosts, or set an API key.",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and not self._trusts(origin, host):
            raise Forbidden(
                f"Without an API key this server takes no requests of pages from {_shown(origin)}: add the origin with "
                "--allowed-origins, or set an API key.",
                code="origin_not_allowed",
            )

    def _serves(self, host: str) -> bool:
        if self._takes_all or (name := _name(host)) in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._takes_addresses or address.is_loopback

    def _trusts(self, origin: str, host: str) -> bool:
        """Return whether an origin is the same site, as far as a TLS proxy shows it, or one of --allowed-origins."""
        if ANY in self._origins or origin in self._origins:
            return True
        scheme, _, site = origin.lower().partition("://")
        return scheme in ("http", "https") and site == host.lower()


class HostMiddleware:
    """Refuses what the guard refuses, on every route."""

    def __init__(self, app: ASGIApp, guard: HostGuard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._guard.check(Headers(scope=scope), scope["http_version"] == "1.0")
            except ServiceError as error:
                await refusal(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name(host: str) -> str:
    """The name or address of a Host's value, without port and brackets; empty where it is no such thing."""
    found = HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""


def _shown(value: str) -> str:
    return repr(value if len(value) <= MAX_SHOWN else value[:MAX_SHOWN] + "...")
