"""One server: its model, token ids for prompts, and streamed completions with the time of every piece."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from random import Random
from types import TracebackType
from typing import Any, Self

import httpx

from benchmarks.errors import BenchmarkError
from benchmarks.load.requests import Asked, RequestResult
from carrel.sse import achunks, authorization, refusal

CONNECT_TIMEOUT_S = 10.0
WORDS = (
    "river",
    "mountain",
    "window",
    "letter",
    "garden",
    "engine",
    "silver",
    "winter",
    "market",
    "doctor",
    "harbour",
)


class RequestFailed(Exception):
    """The server refused a request, or broke its stream. code: as its error has it; empty where it sent none."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class LoadClient:
    """Close it with `async with`. Raises BenchmarkError where the server cannot be used at all."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float, is_carrel: bool = True) -> None:
        """is_carrel: else nothing is asked that not every OpenAI server knows: prompts are text of about as many
        tokens, and there is no policy."""
        self._is_carrel = is_carrel
        self._url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(
            base_url=self._url,
            headers=authorization(api_key),
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """The first model that is served."""
        return str((await self._json("GET", "/v1/models"))["data"][0]["id"])

    async def about(self) -> dict[str, Any]:
        """Return the server's version."""
        return await self._json("GET", "/version") if self._is_carrel else {}

    async def prompt(self, count: int, seed: str) -> list[int] | str:
        """Make a prompt of `count` tokens; text of as many words where the server makes no token ids."""
        if self._is_carrel:
            return await self.token_ids(count, seed)
        return " ".join(Random(seed).choices(WORDS, k=count))

    async def token_ids(self, count: int, seed: str) -> list[int]:
        """Exactly `count` token ids of random words, the same for the same seed."""
        rng, words = Random(seed), max(16, count)
        text = " ".join(rng.choices(WORDS, k=words))
        tokens: list[int] = (await self._json("POST", "/tokenize", {"prompt": text}))["tokens"]
        if len(tokens) < count:
            raise BenchmarkError(f"{words} words made {len(tokens)} tokens, not {count}")
        return tokens[:count]

    async def complete(self, model: str, prompt: list[int] | str, asked: Asked) -> RequestResult:
        """One streamed completion, greedy, of exactly `max_tokens` tokens. Raises RequestFailed."""
        carrel = {"policy": asked.policy, "budget": asked.budget}
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": asked.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._is_carrel:
            body["carrel"] = {name: value for name, value in carrel.items() if value is not None}
        # what writing so many token ids takes is the client's
        pieces = self.pieces(body)
        begin = time.perf_counter()
        try:
            return await _result(pieces, begin)
        except (ValueError, KeyError, AttributeError) as exc:
            raise RequestFailed(f"this is not OpenAI's protocol: {exc!r}") from exc

    def pieces(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The pieces of a streamed completion, whose body is written now; closing it leaves the stream. Raises
        RequestFailed as it is iterated."""
        return self._pieces(json.dumps(body, separators=(",", ":")).encode())

    async def _pieces(self, body: bytes) -> AsyncGenerator[dict[str, Any]]:
        headers = {"content-type": "application/json"}
        try:
            async with self._client.stream(
                "POST", "/v1/completions", content=body, headers=headers
            ) as response:
                if response.is_error:
                    await response.aread()
                    raise RequestFailed(*refusal(response))
                async for piece in achunks(response):
                    if error := piece.get("error"):
                        raise RequestFailed(str(error.get("message", error)), str(error.get("code", "")))
                    yield piece
        except httpx.HTTPError as exc:
            raise RequestFailed(f"{type(exc).__name__}: {exc}") from exc

    async def is_ready(self, patience_s: float = 2.0) -> bool:
        """Return whether the server reports that it is ready."""
        try:
            return (await self._client.get("/ready", timeout=patience_s)).is_success
        except httpx.HTTPError:
            return False

    async def text(self, path: str) -> str:
        """Return the text of a page. Raises BenchmarkError."""
        return (await self._ask("GET", path)).text

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        found: dict[str, Any] = (await self._ask(method, path, body)).json()
        return found

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            response = await self._client.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise BenchmarkError(
                f"no server at {self._url} ({type(exc).__name__}): start one with `carrel serve`, or name it: --url"
            ) from exc
        if response.is_error:
            raise BenchmarkError(f"{self._url}{path}: {refusal(response)[0]}")
        return response


async def _result(chunks: AsyncIterator[dict[str, Any]], begin: float) -> RequestResult:
    first: float | None = None
    last = 0.0
    gaps: list[float] = []
    usage: dict[str, Any] | None = None
    async for chunk in chunks:
        # a finish without text may be all that comes of tokens that make no character
        if chunk.get("choices"):
            now = time.perf_counter() - begin
            if first is None:
                first = now
            else:
                gaps.append(now - last)
            last = now
        usage = chunk.get("usage") or usage
    end = time.perf_counter() - begin
    if usage is None:
        raise RequestFailed("the stream ended without usage")
    details = usage.get("prompt_tokens_details") or {}
    return RequestResult(
        ttft_s=end if first is None else first,
        last_s=last,
        end_s=end,
        prompt_tokens=int(usage["prompt_tokens"]),
        completion_tokens=int(usage["completion_tokens"]),
        cached_tokens=int(details.get("cached_tokens") or 0),
        carrel=dict(usage.get("carrel") or {}),
        gaps_s=tuple(gaps),
    )
