"""Stop strings, and the white space before an answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from gateway.answer_text import AnswerLead, StopMatcher


def reference(text: str, stops: Sequence[str]) -> str:
    for end in range(len(text) + 1):
        matched = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[: end - max(matched)]
    return text


def test_stop_strings_across_any_cut() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        text = "".join(rng.choice("aab🦊") for _ in range(rng.randrange(0, 20)))
        stops = tuple("".join(rng.choice("aab🦊") for _ in range(rng.randrange(1, 5))) for _ in range(2))
        matcher = StopMatcher(stops)
        out, at = "", 0
        while at < len(text) and matcher.found is None:
            size = rng.randrange(1, 4)
            out += matcher.push(text[at : at + size])
            at += size
            # what is out never has to be taken back
            assert reference(text, stops).startswith(out)
        seen = text[:at]
        out += matcher.flush()
        assert (matcher.found is not None) == any(stop in seen for stop in stops)
        assert out == reference(seen, stops)


def test_a_stop_string_may_stay() -> None:
    matcher = StopMatcher(("b.", "xx"), keeps=True)
    assert [matcher.push(piece) for piece in ("a", "b", ". c", "d")] == ["a", "", "b.", ""]
    assert (matcher.found, matcher.flush()) == ("b.", "")


def test_without_stop_strings_nothing_waits() -> None:
    matcher = StopMatcher(())
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([" fox"], "fox"),
        ([" ", "fox", " ran"], "fox ran"),
        (["", " ", " fox"], " fox"),
        (["fox", " ran"], "fox ran"),
        ([" "], ""),
        ([], ""),
    ],
)
def test_lead_of_an_answer_is_left_out_once(pieces: list[str], shown: str) -> None:
    lead = AnswerLead(" ")
    assert "".join([lead.push(piece) for piece in pieces] + [lead.flush()]) == shown


def test_longer_lead_is_left_out_only_whole() -> None:
    for pieces, shown in (([" ", "\n", "fox"], "fox"), ([" ", "fox"], " fox"), ([" "], " ")):
        lead = AnswerLead(" \n")
        assert "".join([lead.push(piece) for piece in pieces] + [lead.flush()]) == shown
