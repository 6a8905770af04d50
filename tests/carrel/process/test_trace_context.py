"""W3C's `traceparent`: what is no valid one is ignored."""

from __future__ import annotations

import pytest

from carrel.process.trace_context import TraceContext, read_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_valid_one_is_read_and_written_again() -> None:
    read = read_traceparent(f"00-{TRACE}-{SPAN}-01")
    assert read == TraceContext(TRACE, SPAN, 1)
    assert read.is_sampled
    assert str(read) == f"00-{TRACE}-{SPAN}-01"
    unsampled = read_traceparent(f"00-{TRACE}-{SPAN}-02")
    assert unsampled is not None
    assert not unsampled.is_sampled
    # a later version may say more
    assert read_traceparent(f"cc-{TRACE}-{SPAN}-01-what-comes") == read


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "hello", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-1", f"ff-{TRACE}-{SPAN}-01"),
        *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01"),
        *(f"00-{TRACE}-{SPAN}-01-more", f"00-{TRACE}-{SPAN}-01\n", f" 00-{TRACE}-{SPAN}-01"),
    ],
)
def test_what_is_none_is_ignored(text: str | None) -> None:
    assert read_traceparent(text) is None
