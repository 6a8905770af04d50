"""Streams as our clients read them."""

from __future__ import annotations

import json

import httpx
import pytest

from carrel.sse import achunks, chunks

# what a line may end with in a text file, but not in a stream of events
TEXT = "one\u2028two\u0085three\x0cfour"
STREAM = [
    b": ping\n\n",
    f"data: {json.dumps({'text': TEXT}, ensure_ascii=False)}\n\n".encode(),
    b'data: {"text":\ndata: "two lines"}\n\n',
    b"data: [DONE]\n\n",
    b"data: never read\n\n",
]


def transport(content: bytes, kind: str = "text/event-stream") -> httpx.MockTransport:
    return httpx.MockTransport(
        lambda request: httpx.Response(200, content=content, headers={"Content-Type": kind})
    )


def test_each_event_up_to_done_is_one_value() -> None:
    with (
        httpx.Client(transport=transport(b"".join(STREAM))) as client,
        client.stream("GET", "http://x") as response,
    ):
        assert list(chunks(response)) == [{"text": TEXT}, {"text": "two lines"}]


async def test_an_asynchronous_client_reads_the_same() -> None:
    async with (
        httpx.AsyncClient(transport=transport(b"".join(STREAM))) as client,
        client.stream("GET", "http://x") as response,
    ):
        assert [chunk async for chunk in achunks(response)] == [{"text": TEXT}, {"text": "two lines"}]


@pytest.mark.parametrize(
    ("content", "kind", "error"),
    [(b"<html>", "text/html", httpx.HTTPError), (b"data: {\n\n", "text/event-stream", ValueError)],
)
def test_what_is_no_stream_is_an_error(content: bytes, kind: str, error: type[Exception]) -> None:
    with (
        httpx.Client(transport=transport(content, kind)) as client,
        client.stream("GET", "http://x") as response,
        pytest.raises(error),
    ):
        list(chunks(response))
