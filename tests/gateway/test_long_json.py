"""JSON of long answers, written in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.rest.long_json import LongJSONResponse, long_json

LONG = [{"id": at, "top": [{"token": "é", "bytes": [195, 169]}] * 3, "logprob": -0.5} for at in range(400)]


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        [[]],
        {"choices": []},
        {"a": {"b": [1, None, True, "x\n\ud83e\udd8a é", 1.5]}, 'a"b': ()},
        {
            "choices": [{"index": 0, "token_ids": list(range(1000))}, {"index": 1, "token_ids": [7]}],
            "usage": None,
        },
        LONG,
        {"metadata": {f"name {at}": each for at, each in enumerate(LONG)}},
        {"content": LONG, "names": ["<s>", '"'] * 300, "tokens": tuple(range(257))},
    ],
)
def test_it_is_that_of_one_call(value: Any) -> None:
    compact = {"ensure_ascii": False, "separators": (",", ":")}
    value = json.loads(json.dumps(value))
    assert long_json(value) == json.dumps(value, **compact)
    assert json.loads(LongJSONResponse(value).body) == value


@pytest.mark.parametrize("each", [5, LONG[0], [1, 2]])
def test_no_call_writes_much_of_it(monkeypatch: pytest.MonkeyPatch, each: Any) -> None:
    """Others have Python's lock between two calls."""
    write, sizes = json.dumps, []

    def watched(value: Any, **named: Any) -> str:
        sizes.append(len(write(value, **named)))
        return write(value, **named)

    monkeypatch.setattr(json, "dumps", watched)
    text = long_json({"choices": [{"index": at, "told": [each] * 10_000} for at in range(3)]})
    assert max(sizes) < len(text) / 100 < sum(sizes)
