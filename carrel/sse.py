"""OpenAI's protocol as every client of ours reads it: events up to [DONE], errors, and the key that is shown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from httpx_sse import EventSource

from carrel.process.options import OptionError

DONE = "[DONE]"


def refusal(response: httpx.Response) -> tuple[str, str]:
    """Return the message and the code of an answer that is an error and was read; a code of "" where it has none."""
    try:
        error = response.json()["error"]
        return str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"the server answered {response.status_code}", ""


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that shows the key of --api-key or CARREL_API_KEY. Raises OptionError for one that no header can hold,
    which is not told: it may be one but for a line's end."""
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise OptionError(
            "the key of --api-key or CARREL_API_KEY cannot be sent: give ASCII characters without blanks and line ends"
        )
    return {"Authorization": f"Bearer {api_key}"}


def chunks(response: httpx.Response) -> Iterator[Any]:
    """Raises httpx.HTTPError for a broken stream and for an answer that is none, ValueError for what is not JSON."""
    for event in EventSource(response).iter_sse():
        if event.data == DONE:
            return
        yield event.json()


async def achunks(response: httpx.Response) -> AsyncIterator[Any]:
    """As `chunks`, of an asynchronous client."""
    async for event in EventSource(response).aiter_sse():
        if event.data == DONE:
            return
        yield event.json()
