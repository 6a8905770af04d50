"""The HTTP client of `carrel chat`: OpenAI's streaming protocol and its errors."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import httpx

from carrel.chat.conversation import ChatOptions, Delta, Message, Model, Usage
from carrel.errors import ChatError
from carrel.process.options import OptionError
from carrel.sse import authorization, chunks, refusal

CONNECT_TIMEOUT_S = 5.0
# a long document is prefilled before the first byte; the server sends heartbeats meanwhile, or should
READ_TIMEOUT_S = 600.0


class ChatClient:
    """One server. Every failure is a ChatError that says what to do; of a URL or a key that is none, an OptionError."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        # other clients are given the URL with it
        self._url = url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._client = httpx.Client(headers=authorization(api_key), timeout=timeout)

    def close(self) -> None:
        self._client.close()

    def model(self) -> Model:
        """The first model that the server serves."""
        with self._translated():
            response = self._client.get(f"{self._url}/v1/models", timeout=CONNECT_TIMEOUT_S)
            if response.is_error:
                raise refused(response)
            first = response.json()["data"][0]
            return Model(str(first["id"]), int(first.get("max_model_len") or 0))

    def stream(
        self, model: str, messages: Sequence[Message], options: ChatOptions
    ) -> Generator[Delta | Usage, None, None]:
        """The answer piece by piece, then its usage. Closing the generator ends the request."""
        body = request_body(model, messages, options)
        with (
            self._translated(),
            self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response,
        ):
            if response.is_error:
                response.read()
                raise refused(response)
            for chunk in chunks(response):
                yield from read_chunk(chunk)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as exc:
            raise ChatError(
                f"no server at {self._url}: start one with `carrel serve`, or name it: --url"
            ) from exc
        except httpx.TimeoutException as exc:
            raise ChatError(f"{self._url} did not answer in time") from exc
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as exc:
            raise OptionError(
                f"--url {self._url} is no address of a server ({exc}): give one such as http://127.0.0.1:8000"
            ) from exc
        except httpx.HTTPError as exc:
            raise ChatError(f"{self._url}: the connection broke ({exc or type(exc).__name__})") from exc
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
            raise ChatError(f"{self._url} does not speak the OpenAI protocol") from exc


def request_body(model: str, messages: Sequence[Message], options: ChatOptions) -> dict[str, Any]:
    """A chat completion request; options left to the server are absent."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    if options.temperature is not None:
        body["temperature"] = options.temperature
    carrel = {"policy": options.policy, "budget": options.budget}
    carrel = {name: value for name, value in carrel.items() if value is not None}
    if carrel:
        body["carrel"] = carrel
    return body


def read_chunk(chunk: dict[str, Any]) -> Iterator[Delta | Usage]:
    """The pieces in one chunk. Raises ChatError for an error that came after the stream began."""
    if error := chunk.get("error"):
        raise ChatError(str(error.get("message", error)))
    for choice in chunk.get("choices") or ():
        if text := (choice.get("delta") or {}).get("content"):
            yield Delta(text)
    if usage := chunk.get("usage"):
        known = {item.name for item in fields(Usage)}
        values = {**usage, **(usage.get("carrel") or {})}
        yield Usage(**{name: value for name, value in values.items() if name in known and value is not None})


def refused(response: httpx.Response) -> ChatError:
    """The server's own words, with the remedy where we know one."""
    message, code = refusal(response)
    if response.status_code == httpx.codes.UNAUTHORIZED:
        message += " (give the key with --api-key or CARREL_API_KEY)"
    if code == "context_length_exceeded":
        message += " (take a shorter --file, or /reset)"
    return ChatError(message)
