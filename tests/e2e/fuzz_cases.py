"""Requests by a seed, from what the server says of its API: good ones, nearly good, hostile and broken ones."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fuzz_values import HEADERS, HOSTILE, METHODS, OTHER_TARGETS, QUERIES, SAMPLES, WRONG

TEMPERS = {"good": 25, "near": 35, "hostile": 25, "broken": 15}
# of what may be left out; without some of it little makes sense
SHARE_GIVEN, USUAL = 0.1, ("content", "prompt", "pinned")
# headers that say where a request ends
FRAMING = {"Content-Length", "Transfer-Encoding", "Expect", "Upgrade", "Connection"}


@dataclass(frozen=True)
class Case:
    """`target`: path and query. `leaves`: its client goes away in the middle of the answer."""

    seed: int
    temper: str
    path: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    leaves: bool

    def wire(self) -> bytes:
        head = [
            f"{self.method} {self.target} HTTP/1.1",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(head).encode("latin-1", "replace") + b"\r\n\r\n" + self.body


class Cases:
    """document: the server's own, of OpenAPI. host: its name and port."""

    def __init__(self, document: Mapping[str, Any], host: str) -> None:
        self._host = host
        self._schemas = document["components"]["schemas"]
        self._operations = [
            (path, method.upper(), operation)
            for path, operations in sorted(document["paths"].items())
            for method, operation in sorted(operations.items())
        ]
        # those that take a body have the most to be wrong
        self._weights = [5 if "requestBody" in operation else 1 for _, _, operation in self._operations]

    def case(self, seed: int) -> Case:
        rng = random.Random(seed)
        [temper] = rng.choices(list(TEMPERS), list(TEMPERS.values()))
        [(path, method, operation)] = rng.choices(self._operations, self._weights)
        draw = _Draw(rng, self._schemas, WRONG[temper])
        leaves = rng.random() < 0.03
        body = b""
        if "requestBody" in operation:
            value = draw.value(operation["requestBody"]["content"]["application/json"]["schema"])
            value = value if leaves else _bounded(rng, value)
            body = json.dumps(value, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")
        target = path
        for parameter in operation.get("parameters", ()):
            name = parameter["name"]
            value = draw.named(name, parameter["schema"])
            target = target.replace(
                f"{{{name}}}", quote(str(value).encode("utf-8", "surrogatepass"), safe="/")
            )
        if temper == "broken":
            body = _broken(rng, body)
            method = rng.choice(METHODS) if rng.random() < 0.3 else method
            target = rng.choice(OTHER_TARGETS) if rng.random() < 0.2 else target
        if temper != "good" and rng.random() < 0.1:
            target += rng.choice(QUERIES)
        named = {"Host": self._host, "Content-Type": "application/json", "X-Request-Id": f"fuzz-{seed}"}
        headers = {**named, "Content-Length": str(len(body)), "Connection": "close"}
        if temper != "good" and rng.random() < 0.25:
            others = dict(rng.sample(HEADERS, rng.randint(1, 3)))
            headers.update(others)
            # the server may rightly wait for more of what is framed falsely
            leaves = leaves or not FRAMING.isdisjoint(others)
        return Case(seed, temper, path, method, target, tuple(headers.items()), body, leaves)


class _Draw:
    """Values of schemas; `wrong`: how often one is another than it should be."""

    def __init__(self, rng: random.Random, schemas: Mapping[str, Any], wrong: float) -> None:
        self._rng, self._schemas, self._wrong = rng, schemas, wrong

    def value(self, schema: Any, depth: int = 0, owner: str = "") -> Any:
        rng = self._rng
        if depth and rng.random() < self._wrong:
            return rng.choice(HOSTILE)
        if reference := schema.get("$ref"):
            owner = reference.rpartition("/")[2]
            return self.value(self._schemas[owner], depth, owner)
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            # what is left out is null as well
            told = [each for each in choices if each.get("type") != "null"] or choices
            return self.value(rng.choice(told), depth, owner)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema, depth, owner)
            case "array":
                many = rng.choice((1, 1, 1, 2, 3, 0 if self._wrong else 1)) if depth < 4 else 0
                return [self.value(schema.get("items", {}), depth + 1, owner) for _ in range(many)]
            case "boolean":
                return rng.random() < 0.5
            case "integer" | "number" as kind:
                return self._number(schema, kind == "integer")
            case "null":
                return None
        texts = ("a", "The amber fox", "x1", "größe", "0", "a b c d e f")
        return rng.choice(texts)[: schema.get("maxLength")]

    def named(self, name: str, schema: Any, depth: int = 1, owner: str = "") -> Any:
        """A field's value: mostly one that makes sense."""
        rng = self._rng
        samples = SAMPLES.get(f"{owner}.{name}") or SAMPLES.get(name)
        if samples and rng.random() > self._wrong + 0.1:
            return rng.choice(samples)
        return self.value(schema, depth, owner)

    def _object(self, schema: Mapping[str, Any], depth: int, owner: str) -> dict[str, Any]:
        rng, required = self._rng, schema.get("required", ())
        found = {
            name: self.named(name, part, depth + 1, owner)
            for name, part in schema.get("properties", {}).items()
            if name in required or rng.random() < (0.9 if name in USUAL else SHARE_GIVEN if depth < 4 else 0)
        }
        if rng.random() < self._wrong:
            found[rng.choice(("extra", "bad_words", "use_beam_search", "\ud800", ""))] = rng.choice(HOSTILE)
        return {
            name: value
            for name, value in found.items()
            if name not in required or rng.random() > self._wrong / 4
        }

    def _number(self, schema: Mapping[str, Any], is_whole: bool) -> Any:
        """Within its bounds or at them, and now and then as a text."""
        rng = self._rng
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        high = schema.get("maximum", schema.get("exclusiveMaximum", 100))
        inside = rng.randint(int(low), int(high)) if is_whole else rng.uniform(low, high)
        at = rng.choice((low, high, inside, min(low + 1, high)))
        if at in (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")):
            at = inside
        if rng.random() < self._wrong * 3:
            at = rng.choice((low - 1, high + 1, at + 0.5))
        return rng.choice((str, float))(at) if rng.random() < 0.1 else at


def _bounded(rng: random.Random, body: Any) -> Any:
    """Answers of a few tokens: ten thousand cases have to end."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if body.get(name) is None:
                body[name] = rng.randint(1, 4)
    return body


def _broken(rng: random.Random, body: bytes) -> bytes:
    at, other = rng.randrange(len(body) + 1), rng.randrange(256)
    return rng.choice(
        (
            lambda: body[:at],
            lambda: body[:at] + bytes([other]) + body[at + 1 :],
            lambda: body[:at] + rng.randbytes(8) + body[at:],
            lambda: rng.randbytes(300),
            lambda: b'{"model": 1, "model": "carrel-nano",' + body[1:],
            lambda: body + body,
            lambda: rng.choice((b"", b"null", b"[]", b"0", b'"x"', b"{}", b"1e999999", b"9" * 5000)),
            lambda: b"[" * 100_000,
            lambda: b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
            lambda: b'{"messages":' * 50_000,
            lambda: b"\xef\xbb\xbf" + body,
            lambda: body.decode("utf-8", "replace").encode("utf-16"),
            lambda: b" " * 1_100_000 + body,
            lambda: b'{"prompt": "' + b"a" * 1_000_000 + b'"}',
        )
    )()
