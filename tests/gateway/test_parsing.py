"""Bodies as they are decoded and checked: long lists of token ids, texts with half a character, and limits."""

from __future__ import annotations

import json
import threading
from array import array
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from gateway_stack import running_stack
from pydantic import ConfigDict, field_validator
from starlette.types import Message
from waiting import PATIENCE

from gateway.body_limits import BodyLimits
from gateway.errors import InvalidRequest, ServiceError, TooLarge
from gateway.heavy_work import HeavyWork
from gateway.json_limits import MAX_VALUES
from gateway.rest.bounded import LARGE_BYTES, BoundedRequest, read_record
from gateway.rest.schemas import Body, CompletionBody, DetokenizeBody
from gpu_worker.v1 import gpu_worker_pb2 as pb

# more than there may be values of any other kind
MANY = 150_000
IDS = [(at * 7919) % 4_000_000_000 for at in range(MANY)]
SHORT = [1, 2, 3]


class Anything(Body):
    model_config = ConfigDict(extra="allow")


def read(body: Any, kind: type[Body] = CompletionBody, max_token_ids: int = MANY) -> Any:
    raw = body if isinstance(body, str) else json.dumps(body)
    return read_record(raw.encode(), kind, max_token_ids).record


@pytest.mark.parametrize("indent", [None, "\t"])
def test_token_ids_are_packed_whatever_stands_around_them(indent: str | None) -> None:
    one = read(json.dumps({"prompt": IDS, "stop": "a"}, indent=indent))
    assert (one.prompt, one.stop) == (array("I", IDS), "a")
    several = read(json.dumps({"prompt": [IDS[:60_000], SHORT, IDS[60_000:120_000]]}, indent=indent))
    assert list(map(list, several.prompt)) == [IDS[:60_000], SHORT, IDS[60_000:120_000]]
    assert read({"tokens": IDS}, DetokenizeBody).tokens == array("I", IDS)
    assert read({"prompt": 'a \\" "prompt": [1, 2]'}).prompt == 'a \\" "prompt": [1, 2]'
    assert read({"prompt": ["1", "2"]}).prompt == ["1", "2"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("\\ud83d", "\ufffd"),
        ("\\uDE00", "\ufffd"),
        ("\\ud83d\\uDE00", "\U0001f600"),
        ("\\ud83d\\ud83d\\ude00\\ude00", "\ufffd\U0001f600\ufffd"),
        ("\\\\ud83d", "\\ud83d"),
        ("\\\\\\ud83d\\\\", "\\\ufffd\\"),
        ("\\ud83d\\u0041", "\ufffdA"),
        ('\\ude00 \\"\\ud83d', '\ufffd "\ufffd'),
    ],
)
def test_half_a_surrogate_pair_is_a_character_that_is_unknown(text: str, meant: str) -> None:
    found = read(f'{{"a{text}": ["{text}", "ud83d"]}}', Anything)
    assert found.model_extra == {f"a{meant}": [meant, "ud83d"]}
    with pytest.raises(InvalidRequest, match="escape"):
        read(f'{{"{text}": "\\ud83"}}', Anything)


@pytest.mark.parametrize("wrong", ["-1", "1.5", "1e3", "null", "true", "[]", "4294967296", "{}"])
def test_what_is_no_id_is_refused_by_its_field(wrong: str) -> None:
    text = ", ".join(map(str, IDS))
    for ids in (f"[{text}, {wrong}]", f"[{wrong}, {text}]"):
        with pytest.raises(ServiceError) as refused:
            read(f'{{"prompt": {ids}}}', max_token_ids=2 * MANY)
        match refused.value:
            case TooLarge():
                # the first is a list: then only lists have ids
                assert (wrong, ids[:3]) == ("[]", "[[]")
            case error:
                assert error.param is not None
                assert error.param.startswith("prompt")
                assert len(error.message) < 2100


@pytest.mark.parametrize("broken", ["1,,2", "1,", ",1", "01", "1 2", "1;2", "1" * 5000, "\\u0031", "", "1]"])
def test_what_is_no_json_is_refused(broken: str) -> None:
    text = ", ".join(map(str, IDS[:20_000]))
    for body in (
        f'{{"prompt": [{text}, {broken}]}}',
        f'{{"prompt": [{broken},{text}]}}',
        f'{{"prompt": [{text}]',
    ):
        with pytest.raises(InvalidRequest, match=r"Invalid JSON: .* at line 1 column"):
            read(body)


def test_very_many_long_numbers_are_refused_before_they_are_decoded() -> None:
    for number in ("1" * 30, "1.2345678901234567e-300"):
        with pytest.raises(InvalidRequest, match="not all of prompt and tokens are token ids"):
            read(f'{{"prompt": [{", ".join([number] * 2 * MANY)}]}}', max_token_ids=2 * MANY)


def test_only_ids_may_be_more_than_other_values() -> None:
    inner = {"prompt": IDS}
    for body in (
        {"stop_token_ids": IDS},
        {"any name": IDS},
        {"messages": [inner]},
        {"prompt": inner},
        [inner],
    ):
        with pytest.raises(TooLarge, match=f"values beside prompt and tokens: at most {MAX_VALUES}"):
            read(body)
    with pytest.raises(TooLarge, match="values: at most"):
        read({"prompt": IDS}, max_token_ids=10)


async def test_others_have_their_turns_meanwhile() -> None:
    """A large body is decoded and checked outside of the event loop's thread."""
    threads: list[int] = []

    class Noting(Body):
        prompt: str

        @field_validator("prompt")
        @classmethod
        def note(cls, text: str) -> str:
            threads.append(threading.get_ident())
            return text

    limits = BodyLimits(Mock(latest=pb.GetInfoResponse(max_model_len=MANY)), None, HeavyWork(), 2**28, 60.0)
    for size in (LARGE_BYTES // 2, LARGE_BYTES):
        raw = json.dumps({"prompt": "x" * size}).encode()

        async def receive(raw: bytes = raw) -> Message:
            return {"type": "http.request", "body": raw, "more_body": False}

        headers = [(b"content-type", b"application/json")]
        request = BoundedRequest({"type": "http", "headers": headers, "state": {"caller": b"a"}}, receive)
        assert len((await request.load(Noting, limits)).prompt) == size
    assert threads[0] == threading.get_ident() != threads[1]


def test_a_prompt_of_very_many_ids_comes_to_the_worker_and_back(tmp_path: Path, model_dir: Path) -> None:
    ids = [at % 200 for at in range(MANY)]
    asked = {"max_tokens": 2, "return_token_ids": True}
    with (
        running_stack(tmp_path, model_dir, max_model_len=MANY + 10) as stack,
        httpx.Client(base_url=stack.url, timeout=PATIENCE) as http,
    ):
        script = stack.say("the fox")
        whole = http.post("/v1/completions", json={"prompt": ids, "n": 2, **asked}).json()
        assert [each["prompt_token_ids"] for each in whole["choices"]] == [ids, ids]
        assert whole["usage"]["prompt_tokens"] == MANY
        assert [list(request.prompt_token_ids) for request in script.requests] == [ids, ids]

        prompts = [ids[:20_000], ids[:3], ids[5:9_000]]
        several = http.post("/v1/completions", json={"prompt": prompts, **asked}).json()
        assert [each["prompt_token_ids"] for each in several["choices"]] == prompts

        kept = http.post("/v1/completions", json={"prompt": ids, "truncate_prompt_tokens": 5, **asked}).json()
        assert kept["choices"][0]["prompt_token_ids"] == ids[-5:]

        stream = http.post("/v1/completions", json={"prompt": ids, "stream": True, **asked}).text
        first = json.loads(stream.split("\n\n")[0].removeprefix("data: "))
        assert first["choices"][0]["prompt_token_ids"] == ids

        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert text == stack.tokenizer.decode(ids)
        assert http.post("/v1/sessions/a", json={"prompt": ids}).json()["warmed"]["prompt_tokens"] == MANY
        refused = http.post("/v1/completions", json={"prompt": [*ids, -1]})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt"
