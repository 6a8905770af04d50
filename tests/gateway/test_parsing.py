"""Long lists of token ids in a body: parsed in pieces, to what one call would make of the whole."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_stack import running_stack
from waiting import PATIENCE

from gateway.errors import InvalidRequest, TooLarge
from gateway.heavy_work import HeavyWork
from gateway.json_limits import MAX_VALUES
from gateway.rest.parsing import LARGE_BYTES, look, parse

# of several pieces, and longer than it may be where nobody may have a prompt
MANY = 150_000
IDS = [(at * 7919) % 4_000_000_000 for at in range(MANY)]
SHORT = [1, 2, 3]


def parsed(raw: bytes | str, max_token_ids: int = MANY) -> Any:
    return asyncio.run(read(raw.encode() if isinstance(raw, str) else raw, max_token_ids))


async def read(raw: bytes, max_token_ids: int) -> Any:
    return await parse(raw, max_token_ids, await look(raw, max_token_ids, HeavyWork().of(b"")))


def plain(value: Any) -> Any:
    """With lists for arrays."""
    match value:
        case dict():
            return {name: plain(each) for name, each in value.items()}
        case array():
            return value.tolist()
        case [*_]:
            return [plain(each) for each in value]
    return value


@pytest.mark.parametrize("indent", [None, "\t"])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": IDS, "max_tokens": 4},
        {"stop": "a", "prompt": [IDS[:60_000], SHORT, [], IDS[60_000:120_000]]},
        {"tokens": IDS, "prompt": '"tokens": [1, 2]\\'},
        {"prompt": 'a \\" \\\\ "prompt": [' + "1," * 10_000 + "1]", "stop": ["\\", '"']},
    ],
)
def test_it_is_what_one_call_would_make_of_it(body: dict[str, Any], indent: str | None) -> None:
    assert plain(parsed(json.dumps(body, indent=indent))) == body


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
    ids = json.dumps(IDS[:5000])
    found = plain(parsed(f'{{"prompt": {ids}, "a{text}": ["{text}", "ud83d"]}}'))
    assert found == {"prompt": IDS[:5000], f"a{meant}": [meant, "ud83d"]}
    with pytest.raises(ValueError, match="escape"):
        parsed(f'{{"{text}": "\\ud83"}}')


def test_long_lists_of_ids_are_arrays_and_no_others() -> None:
    found = parsed(json.dumps({"prompt": [IDS[:5000], SHORT], "tokens": IDS[:5000], "stop": IDS[:5000]}))
    kinds = [type(each) for each in (*found["prompt"], found["tokens"], found["stop"])]
    assert kinds == [array, list, array, list]
    inner = {"prompt": IDS[:5000], "tokens": [IDS[:5000]]}
    in_a_list = ["prompt", IDS[:5000]]
    for body in ({"messages": [inner]}, {"metadata": inner}, [inner], {"prompt": inner}, in_a_list):
        assert parsed(json.dumps(body)) == body
    assert type(parsed(json.dumps({"prompt": IDS[:5]}))["prompt"]) is list


@pytest.mark.parametrize("wrong", ["-1", "1.5", "1e3", "null", "true", "[]", "4294967296", "{}"])
def test_what_is_no_id_stays_as_it_was_or_is_refused_by_its_field(wrong: str) -> None:
    text = ", ".join(map(str, IDS[:20_000]))
    for body in (f'{{"prompt": [{text}, {wrong}]}}', f'{{"prompt": [{wrong}, {text}]}}'):
        assert plain(parsed(body)) == json.loads(body)
    long = ", ".join(map(str, IDS))
    with pytest.raises((InvalidRequest, TooLarge)) as refused:
        parsed(f'{{"tokens": [{long}, {wrong}, {long[:-10]}]}}', 3 * MANY)
    if wrong not in ("[]", "{}"):
        assert refused.value.param == "tokens"


@pytest.mark.parametrize("broken", ["1,,2", "1,", ",1", "01", "1 2", "1;2", "1" * 5000, "\\u0031", "", "1]"])
def test_what_is_no_json_stays_none(broken: str) -> None:
    text = ", ".join(map(str, IDS[:20_000]))
    for body in (f'{{"prompt": [{text}, {broken}]}}', f'{{"prompt": [{broken},{text}]}}'):
        with pytest.raises(ValueError, match=r"line|integer string"):
            json.loads(body)
        with pytest.raises(ValueError, match="at line 1 column"):
            parsed(body)
    for body in (
        f'{{"prompt" [{text}]}}',
        f'{{"prompt": [{text}]',
        f'{{prompt": [{text}]}}',
        f'"prompt": [{text}]',
        f'{{"stop": "prompt", [{text}]: 5}}',
        f'{{"prompt": null, [{text}]: 5}}',
        f'{{"prompt": -[{text}]}}',
    ):
        with pytest.raises(ValueError, match="at line 1 column"):
            parsed(body)


def test_only_ids_may_be_more_than_other_values() -> None:
    for name in ("stop_token_ids", "any name", "messages"):
        with pytest.raises(TooLarge, match=f"values beside prompt and tokens: at most {MAX_VALUES}"):
            parsed(json.dumps({name: [1] * MANY, "prompt": SHORT[:2]}))


async def turns_during(work: Callable[[], Any]) -> int:
    """How often an event loop turns while it awaits the work."""
    task, turns = asyncio.ensure_future(work()), 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    await task
    return turns


def test_others_have_their_turns_meanwhile() -> None:
    raw = json.dumps({"prompt": IDS[:70_000]}).encode()
    # a longer one is looked through in a thread, beside which the loop turns as it may
    assert len(raw) < LARGE_BYTES
    assert asyncio.run(turns_during(lambda: read(raw, MANY))) > 10


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
