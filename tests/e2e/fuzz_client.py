"""Sends what no HTTP library would, and says what is wrong with the answer."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

import jsonschema
from fuzz_cases import Case
from serving import ROOT

PATIENCE_S = 120.0
# of one that leaves
SHORT_S = 0.3
MOST_ERROR_BYTES = 16 << 10
SERVERS_FAULT = re.compile(
    rb'"type": ?"(InternalServerError|ServiceUnavailableError|api_error|overloaded_error)"'
)


@dataclass(frozen=True)
class Outcome:
    """`status`: 0 where there was no answer; `has_ended`: all of it came before the client's patience was over."""

    status: int
    media: str
    has_id: bool
    body: bytes
    has_ended: bool
    seconds: float


def send(case: Case, host: str, port: int) -> Outcome:
    began = time.monotonic()
    until = began + (SHORT_S if case.leaves else PATIENCE_S)
    status, media, has_id, body, has_ended = 0, "", False, bytearray(), False
    with socket.create_connection((host, port), timeout=PATIENCE_S) as link:
        try:
            link.sendall(case.wire())
            link.settimeout(max(0.01, until - time.monotonic()))
            response = HTTPResponse(link, method=case.method)
            response.begin()
            status, media = response.status, response.headers.get_content_type()
            has_id = "X-Request-Id" in response.headers
            while time.monotonic() < until:
                link.settimeout(max(0.01, until - time.monotonic()))
                if not (piece := response.read1(1 << 16)):
                    has_ended = True
                    break
                body += piece
        except (HTTPException, OSError):
            # it ended the connection, or sent nothing for too long
            has_ended = time.monotonic() < until
    return Outcome(status, media, has_id, bytes(body), has_ended, time.monotonic() - began)


class Judge:
    """document: the server's own, of OpenAPI."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._paths = document["paths"]
        self._definitions = {"components": document["components"]}

    def faults(self, case: Case, outcome: Outcome) -> Iterator[str]:
        """Yield each fault of the server."""
        status, body = outcome.status, outcome.body
        # who asks for an early end gets it
        is_late = status == 504 and b"timeout_seconds" in case.body
        if status >= 500 and not is_late:
            yield f"{status}: {body[:300]!r}"
        if SERVERS_FAULT.search(body):
            yield f"an error of the server's within: {body[-300:]!r}"
        if not outcome.has_ended and not case.leaves:
            yield f"no end after {outcome.seconds:.0f} s"
        if 400 <= status < 500:
            yield from self._faults_of_error(case, outcome)
        if (
            status == 200
            and outcome.has_ended
            and outcome.media == "application/json"
            and case.method != "HEAD"
        ):
            yield from self._faults_of_answer(case, body)

    def _faults_of_error(self, case: Case, outcome: Outcome) -> Iterator[str]:
        body = outcome.body
        if len(body) > MOST_ERROR_BYTES:
            yield f"an error of {len(body)} bytes"
        if str(ROOT).encode() in body or b"Traceback" in body or b'File "' in body:
            yield f"a path within: {body[:300]!r}"
        # what is no HTTP at all is refused below the API
        if body and outcome.has_id and case.method != "HEAD":
            try:
                told = json.loads(body)["error"]
                if not (told["type"] and told["message"]):
                    yield f"an empty error: {body[:300]!r}"
            except (ValueError, KeyError, TypeError):
                yield f"no error that a client could read: {body[:300]!r}"

    def _faults_of_answer(self, case: Case, body: bytes) -> Iterator[str]:
        try:
            answer = json.loads(body, parse_constant=_no_constant)
        except ValueError as error:
            yield f"no JSON, {error}: {body[:300]!r}"
            return
        operation = self._paths.get(case.path, {}).get(case.method.lower())
        if operation is None or case.temper == "broken":
            # maybe another route's
            return
        schema = operation["responses"]["200"]["content"]["application/json"].get("schema", {})
        error = next(
            jsonschema.Draft202012Validator({**self._definitions, **schema}).iter_errors(answer), None
        )
        if error is not None:
            yield f"not as documented, {error.json_path}: {error.message[:200]}"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
