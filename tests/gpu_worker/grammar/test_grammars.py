"""Answers of random logits, held to grammars over the bundled model's vocabulary."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from gpu_worker.errors import RequestError
from gpu_worker.grammar import Grammars
from gpu_worker.grammar.trial import Trial
from gpu_worker.records import Grammar, GrammarKind, SamplingParams
from gpu_worker.sampling import Sampler, SamplerState

MODEL = Path(__file__).parents[3] / "models" / "carrel-nano"
VOCAB_SIZE, END, END_TEXT = 8192, 4, "<|end|>"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["book", "film"]},
        "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}

CHAIN = "".join(f"a{at}: a{at + 1}\n" for at in range(9000))


def grammar(kind: GrammarKind, text: object) -> Grammar:
    return Grammar(kind, text if isinstance(text, str) else json.dumps(text), "the_field")


def answer(grammars: Grammars, asked: Grammar, seed: int = 0, **params: object) -> tuple[list[int], bool]:
    """Token ids drawn from random logits, end token left out, and whether the answer came to its end."""
    state = SamplerState(
        SamplingParams(**{"seed": seed, **params}),
        (1, 2),
        VOCAB_SIZE,
        (END,),
        "r",
        None,
        grammars.compile(asked).result(),
    )
    generator, tokens = torch.Generator().manual_seed(seed), list[int]()
    while len(tokens) < 400:
        logits = 3 * torch.randn(1, VOCAB_SIZE, generator=generator)
        event = Sampler().sample(logits, [state])[0]
        assert event is not None
        state.append(event.token_id)
        if event.token_id in state.end_token_ids:
            return tokens, True
        tokens.append(event.token_id)
        if state.is_complete:
            return tokens, True
    return tokens, False


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"repetition_penalty": 1.5, "presence_penalty": 2.0, "top_p": 0.5, "min_tokens": 300},
        {"logit_bias": ((END, 100.0), (99, 100.0)), "stop_token_ids": (99,), "top_k": 2},
        {"ignore_eos": True, "logprobs": 2},
    ],
)
def test_an_answer_is_json_of_the_schema_however_it_is_sampled(
    grammars: Grammars, tokenizer: Tokenizer, params: dict[str, object]
) -> None:
    tokens, has_ended = answer(grammars, grammar(GrammarKind.JSON_SCHEMA, SCHEMA), **params)
    assert has_ended
    jsonschema.validate(json.loads(tokenizer.decode(tokens)), SCHEMA)


@pytest.mark.parametrize(("white", "most"), [("\t", 5), (" ", 20)])
def test_a_model_that_is_lost_in_white_space_is_soon_out_of_it(
    grammars: Grammars, tokenizer: Tokenizer, white: str, most: int
) -> None:
    ids = [tokenizer.encode(f"a{text}", add_special_tokens=False).ids[-1] for text in (white, "\n")]
    named = {"properties": {name: {"const": 1} for name in "ab"}, "required": ["a", "b"]}
    asked = grammar(GrammarKind.JSON_SCHEMA, {"type": "object", **named, "additionalProperties": False})
    tokens, has_ended = answer(grammars, asked, logit_bias=tuple((each, 100.0) for each in ids))
    assert has_ended
    text = tokenizer.decode(tokens)
    assert json.loads(text) == {"a": 1, "b": 1}
    assert max(map(len, re.findall(rf"\n({white}*)", text))) == most


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        (GrammarKind.REGEX, r"[a-c]{3}-\d{2}", r"[a-c]{3}-\d{2}"),
        (GrammarKind.EBNF, 'start: "yes" | "no, " /[a-z]{1,9}/ "!"', r"yes|no, [a-z]+!"),
        (GrammarKind.EBNF, 'root ::= "x" [0-9] [0-9]?', r"x\d\d?"),
        (GrammarKind.EBNF, 'start: "🦊\\n\\"" | "<|end|>"', r'🦊\n"|<\|end\|>'),
    ],
)
def test_an_answer_is_of_the_grammar(
    grammars: Grammars, tokenizer: Tokenizer, kind: GrammarKind, text: str, pattern: str
) -> None:
    tokens, has_ended = answer(grammars, grammar(kind, text))
    assert has_ended
    assert END not in tokens
    assert re.fullmatch(pattern, tokenizer.decode(tokens, skip_special_tokens=False))


def test_min_tokens_lengthen_an_answer_as_far_as_the_grammar_lets(grammars: Grammars) -> None:
    many = grammar(GrammarKind.REGEX, "[a-z]*")
    assert len(answer(grammars, many, logit_bias=((END, 100.0),))[0]) == 0
    assert len(answer(grammars, many, logit_bias=((END, 100.0),), min_tokens=7)[0]) == 7


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GrammarKind.JSON_SCHEMA, {"type": "thing"}, "Invalid type: thing"),
        (GrammarKind.JSON_SCHEMA, {"type": "array", "uniqueItems": True}, "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, {"$ref": "http://localhost/x"}, "http://localhost/x"),
        (GrammarKind.JSON_SCHEMA, "{", "property name"),
        (GrammarKind.JSON_SCHEMA, "7", "Expecting object"),
        (GrammarKind.REGEX, "(a", "unclosed group"),
        (GrammarKind.EBNF, "start: nothing", "unknown name"),
        (GrammarKind.EBNF, "no grammar", ""),
        # a rule that begins with itself, and has no other way
        (GrammarKind.EBNF, 'start: sum\nsum: sum "+" "1"', "leads back to itself needs another way to end"),
        (GrammarKind.JSON_SCHEMA, {"$ref": "#"}, "leads back to itself needs another way to end"),
        (GrammarKind.EBNF, 'start: "a" start', "without an end"),
        (GrammarKind.REGEX, "a{5000000}", "by smaller numbers"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_the_reason(
    grammars: Grammars, kind: GrammarKind, text: object, reason: str
) -> None:
    with pytest.raises(RequestError, match=f"the_field cannot be used: .*{re.escape(reason)}") as error:
        grammars.compile(grammar(kind, text)).result()
    assert error.value.param == "the_field"
    assert len(str(error.value)) < 400
    assert "<" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        pytest.param(GrammarKind.REGEX, ".*" * 20_000, "takes too long", id="minutes"),
        pytest.param(GrammarKind.EBNF, "start: a0\n" + CHAIN + 'a9000: "a"', "too deeply", id="stack"),
    ],
)
def test_a_grammar_that_would_take_minutes_or_end_the_process_is_refused(
    kind: GrammarKind, text: str, reason: str
) -> None:
    trial = Trial(MODEL, (END,), seconds=0.3)
    assert reason in (trial.reason(grammar(kind, text)) or "")
    assert trial.reason(grammar(GrammarKind.REGEX, "a")) is None
    trial.close()


def test_without_the_library_or_the_tokens_a_grammar_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = grammar(GrammarKind.REGEX, "a")
    Grammars(str(tmp_path), (END,)).prepare()
    with pytest.raises(RequestError, match="put the one that the gateway uses there") as error:
        Grammars(str(tmp_path), (END,)).compile(asked).result()
    assert error.value.code == "grammar_unavailable"
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install llguidance") as error:
        Grammars(str(MODEL), (END,)).compile(asked).result()
    assert (error.value.param, error.value.code) == ("the_field", "grammar_unavailable")


def test_answers_of_one_grammar_go_their_own_ways_in_any_thread(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    found: dict[int, tuple[list[int], bool]] = {}
    asked = grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
    alone = answer(grammars, asked, seed=5)
    threads = [
        threading.Thread(target=lambda seed=seed: found.update({seed: answer(grammars, asked, seed)}))
        for seed in range(4, 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[5] == alone
    assert len({tuple(tokens) for tokens, _ in found.values()}) == 4
