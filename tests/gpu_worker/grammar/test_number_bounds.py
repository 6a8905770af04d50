"""Answers that are lost in the digits of a number, over the bundled model's vocabulary."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from gpu_worker.grammar import Grammars
from gpu_worker.records import Grammar, GrammarKind

VOCAB_SIZE, END = 8192, 4
INTEGER, NUMBER, TEXT = ({"type": kind} for kind in ("integer", "number", "string"))
TOOL = 'start: "<call>" %json {"properties": {"a": {"type": "number"}}} "</call>"'


def next_characters(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, begun: str, vocab_size: int = VOCAB_SIZE
) -> set[str]:
    """With which a token may begin behind this text; \x03: the answer may end."""
    constraint = grammars.compile(grammar).result()
    for token_id in tokenizer.encode(begun, add_special_tokens=False).ids:
        assert constraint.allowed(vocab_size, {END})[token_id // 32] >> token_id % 32 & 1
        constraint.take(token_id)
    bits = np.unpackbits(constraint.allowed(vocab_size, {END}).view(np.uint8), bitorder="little")
    tokens = [int(token_id) for token_id in np.flatnonzero(bits)]
    return {"\x03" if each == END else tokenizer.decode([each])[0] for each in tokens}


def of_schema(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "the_field")


@pytest.mark.parametrize(
    ("grammar", "begun"),
    [
        pytest.param(of_schema(INTEGER), "", id="whole"),
        pytest.param(of_schema({**INTEGER, "minimum": -5}), "", id="of-one-bound"),
        pytest.param(of_schema(NUMBER), "-", id="negative"),
        pytest.param(of_schema(NUMBER), "0.", id="fraction"),
        pytest.param(of_schema(NUMBER), "1.5e+", id="exponent"),
        pytest.param(of_schema({**NUMBER, "minimum": 0, "maximum": 9}), "5.", id="fraction-within-bounds"),
        pytest.param(of_schema({"type": "object"}), '{"a": [', id="any-json"),
        pytest.param(of_schema({"additionalProperties": INTEGER}), '{"a": ', id="more-properties"),
        pytest.param(of_schema({"anyOf": [TEXT, {"items": INTEGER}]}), "[", id="one-of-several"),
        pytest.param(of_schema({"items": {"$ref": "#/$defs/n"}, "$defs": {"n": NUMBER}}), "[2,", id="ref"),
        pytest.param(Grammar(GrammarKind.EBNF, TOOL, "tools"), '<call>{"a": ', id="arguments-of-a-tool"),
    ],
)
def test_a_number_ends_after_its_twentieth_digit_in_a_row(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, begun: str
) -> None:
    assert next_characters(grammars, tokenizer, grammar, begun + 17 * "7") & set("0123456789")
    found = next_characters(grammars, tokenizer, grammar, begun + 20 * "7")
    assert found
    assert not found & set("0123456789")
    # of a model with more tokens than the grammar's vocabulary, or fewer
    for size in (VOCAB_SIZE + 50, 1000):
        assert not next_characters(grammars, tokenizer, grammar, begun + 20 * "7", size) & set("0123456789")


def test_noughts_that_never_reach_a_number_come_to_an_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    above = of_schema({**NUMBER, "exclusiveMinimum": 0, "maximum": 1})
    assert next_characters(grammars, tokenizer, above, "0." + 20 * "0") == set("123456789")
    # a double is above 78 with the tenth digit, and not with the twentieth
    above = of_schema({**NUMBER, "exclusiveMinimum": 78, "maximum": 90})
    assert "0" in next_characters(grammars, tokenizer, above, "78." + 8 * "0")
    assert next_characters(grammars, tokenizer, above, "78." + 9 * "0") == set("123456789")
    assert {"0", "\x03"} < next_characters(grammars, tokenizer, of_schema(NUMBER), "78." + 9 * "0")
    large = of_schema({**INTEGER, "minimum": 10**16})
    assert "0" in next_characters(grammars, tokenizer, large, "1" + 15 * "0")
    far = of_schema({**NUMBER, "minimum": 1e-30, "maximum": 2e-30})
    assert next_characters(grammars, tokenizer, far, "0." + 25 * "0") == {"0"}


@pytest.mark.parametrize(
    ("grammar", "begun", "found"),
    [
        (of_schema({**TEXT, "pattern": "^[0-9]{26}$"}), '"', set("0123456789")),
        (of_schema({**TEXT, "pattern": "^[0-9]+$"}), '"', set('0123456789"')),
        (Grammar(GrammarKind.REGEX, "[0-9]+", "the_field"), "", set("0123456789\x03")),
        (Grammar(GrammarKind.EBNF, "start: /[0-9]+/", "the_field"), "", set("0123456789\x03")),
    ],
)
def test_digits_of_texts_are_not_bounded(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, begun: str, found: set[str]
) -> None:
    assert next_characters(grammars, tokenizer, grammar, begun + 22 * "7") == found
