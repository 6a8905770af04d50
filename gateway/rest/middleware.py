"""Steps of every request before its route is looked up."""

from __future__ import annotations

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.process.request_context import RequestContext, working_for
from carrel.process.trace_context import TRACEPARENT, read_traceparent
from gateway.auth import KeyRing, only
from gateway.errors import Unauthorized
from gateway.exchange import public_id
from gateway.metrics import Metrics
from gateway.rate_limits import RateLimits
from gateway.rest.errors import refusal
from gateway.rest.hints import HEADER as IGNORED_HEADER
from gateway.rest.seats import Seat
from gateway.rest.server_endpoints import DOCS_PATH
from gateway.rest.server_endpoints import PATH as PAGE_PATH

# exactly these paths are open; everything else, known or not, needs a key. The pages hold nothing of anybody's, and ask
# for a key themselves.
UNGUARDED_PATHS = frozenset({"/health", "/ready", DOCS_PATH, PAGE_PATH})
RATE_HEADERS = [
    f"x-ratelimit-{what}-{kind}"
    for what in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
]

log = logging.getLogger(__name__)


class RootPathMiddleware:
    """Tells routes the path under which a proxy serves the API; it may be in a request's path, or taken out."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._root_path}, receive, send)


class RequestIdMiddleware:
    """Puts the request's id into `scope["state"]["request_id"]`, into every answer's X-Request-Id and, with the trace
    that the client sent, into all that is logged of it. Names the hints that reading the body ignored, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope)
        request_id = public_id(asked.get("x-request-id"))
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                # its body may have said another
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = state["request_id"]
                if ignored := state.get("ignored"):
                    headers[IGNORED_HEADER] = ignored
            await send(message)

        with working_for(RequestContext(request_id, read_traceparent(asked.get(TRACEPARENT)))):
            await self._app(scope, receive, send_with_id)


class AuthMiddleware:
    """Refuses requests without a key; of the others `scope["state"]["caller"]` says whose they are, and their answers
    what is left to it. Decides by the raw path of the scope, which no header can change."""

    def __init__(self, app: ASGIApp, keys: KeyRing, rate_limits: RateLimits, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._rate_limits = rate_limits
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        is_guarded = scope["type"] == "http" and path not in UNGUARDED_PATHS
        if is_guarded:
            headers = Headers(scope=scope)
            # Anthropic's clients send the key alone
            alone = [f"Bearer {key}" for key in headers.getlist("x-api-key")]
            caller = self._keys.caller(only(headers.getlist("authorization") or alone))
            if caller is None:
                self._metrics.count_rejected(error := Unauthorized())
                await refusal(scope, error)(scope, receive, send)
                return
            state = scope.setdefault("state", {})
            state["caller"] = caller
            # Ray Serve's proxies have connections of their own
            seat: Seat | None = state.get("seat")
            if caller and seat is not None:
                seat.belong(caller)
            send = self._telling(caller, send)
        await self._app(scope, receive, send)

    def _telling(self, caller: bytes, send: Send) -> Send:
        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._rate_limits.headers(caller))
            await send(message)

        return send_with_limits


class UnexpectedErrorMiddleware:
    """Turns a bug into one log entry and a plain 500; the connection stays usable."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            if scope["type"] != "http" or has_started:
                raise
            log.exception("request %s failed", scope["state"]["request_id"])
            await refusal(scope, None)(scope, receive, send)
