"""Random answers of texts, calls and what models get wrong, cut anywhere: streamed in any pieces they hold what a plain
parser finds in the whole."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from reference import OPENERS, parts

from gateway.exchange import TextDelta, ToolCallDelta
from gateway.tool_calls import FAMILIES, CallsReader

OFFERED = frozenset({"f", "get_time"})
NAMES = ("f", "get_time", "Rex", "no name", "\ud83d", "", "a" * 65)
SPACES = ("", "", " ", "\n", "\r\n\t", "\n\n")
JUNK = ("}", "]", ",", "; ", "</tool_call>", "<tool", "[TOOL", "{", '"', "\\", "[", "<|python", "[ARGS]", ":")
WORDS = (
    "Use ", "the tool", ".", "\u3000", "{}", '{"a": 1}', "\n", "  ", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>",
    "x{", "é\U0001f600", '{"name": "Rex", "age": 3}', "</tool_call>", "f[ARGS]", "1 < 2",
)  # fmt: skip
VALUES = (
    1,
    None,
    True,
    "a",
    "}",
    '"',
    "\\",
    "é",
    [1, "]"],
    {"x": {"y": "{"}},
    "\ud83d",
    {},
    [],
    "<tool_call>",
)


def literal(rng: random.Random, value: object) -> str:
    separators = rng.choice([None, (",", ":"), (" , ", " :\n")])
    return json.dumps(value, separators=separators)


def arguments(rng: random.Random) -> object:
    found: object = {rng.choice("abc"): rng.choice(VALUES) for _ in range(rng.randrange(3))}
    return rng.choice([found, found, found, found, json.dumps(found), "", None, 7, [1], "text"])


def called(rng: random.Random, key: str) -> str:
    """An object that may be a call."""
    members: list[tuple[str, object]] = [("name", rng.choice(NAMES)), (key, arguments(rng))]
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        other = rng.choice([("id", "x"), ("name", rng.choice(NAMES)), (key, arguments(rng)), ("age", 3)])
        members.insert(rng.randrange(3), other)
    if rng.random() < 0.2:
        members.pop(rng.randrange(len(members)))
    if rng.random() < 0.1:
        rng.shuffle(members)
    text = ", ".join(f"{literal(rng, name)}: {literal(rng, value)}" for name, value in members)
    return f"{{{text}}}"


def calls(rng: random.Random, family: str) -> str:
    """Some calls in a row, as the family writes them."""
    space = rng.choice(SPACES)
    many = [called(rng, FAMILIES[family].arguments) for _ in range(rng.choice([1, 1, 2, 3]))]
    opener = OPENERS[family]
    match rng.choice(["own", "own", "bare", "named"]), family:
        case "own", "hermes":
            return space.join(f"{opener}{space}{each}{space}</tool_call>" for each in many)
        case _, "hermes":
            return f"{opener}{space}" + f"{space}{rng.choice([opener, ''])}".join(many)
        case "own", "mistral":
            return f"{opener}{space}[{', '.join(many)}]"
        case "bare", "mistral":
            return space.join(f"{opener}{each}" for each in many)
        case _, "mistral":
            middle = rng.choice(["", "[ARGS]", "[CALL_ID]abc1[ARGS]"])
            named = "".join(f"{opener}f{middle}{literal(rng, arguments(rng))}" for _ in many)
            return named + rng.choice(["", "", f",{space}{many[0]}"])
    return rng.choice(["", opener]) + rng.choice(["; ", ", ", "\n", f";{opener}"]).join(many)


def answer(rng: random.Random, family: str) -> str:
    written = ""
    for _ in range(rng.randrange(1, 5)):
        begins = rng.random() < (0.8 if family != "llama3_json" or not written else 0.2)
        written += calls(rng, family) if begins else "".join(rng.choices(WORDS, k=rng.randrange(4)))
        written += rng.choice(SPACES)
    for _ in range(rng.choice([0, 0, 1, 3])):
        # something is left out, or is there that should not be
        at = rng.randrange(len(written) + 1)
        written = written[:at] + rng.choice(["", rng.choice(JUNK)]) + written[at + rng.randrange(2) :]
    return written[: rng.randrange(len(written) + 1)] if rng.random() < 0.3 else written


def pieces(rng: random.Random, text: str) -> list[str]:
    most = rng.choice([1, 3, 20, 1000])
    found = []
    while text:
        size = rng.randint(1, most)
        found.append(text[:size])
        text = text[size:]
    return found


def read(family: str, streamed: Sequence[str]) -> list[str | tuple[str, str]]:
    """Texts and calls in their order."""
    reader = CallsReader(0, FAMILIES[family], True, OFFERED)
    told: list[str | tuple[str, str]] = []
    num_calls = 0
    for part in [part for piece in streamed for part in reader.push(piece)] + list(reader.flush()):
        match part, told:
            case TextDelta(text=text), [*_, str() as before]:
                told[-1] = before + text
            case TextDelta(text=text), _:
                told.append(text)
            case ToolCallDelta(place=place, name=name), _ if name:
                assert place == num_calls
                num_calls += 1
                told.append((name, part.arguments))
            case ToolCallDelta(place=place, arguments=more), [*_, (name, before)]:
                assert place == num_calls - 1
                told[-1] = (name, before + more)
    return told


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(8))
def test_a_stream_holds_what_the_whole_does(family: str, seed: int) -> None:
    rng = random.Random(f"{family} {seed}")
    num_calls = num_texts = 0
    for _ in range(400):
        text = answer(rng, family)
        written, told = parts(family, text, OFFERED)
        # nothing is lost: all of it is text, a call or white space beside a call
        assert "".join(piece.raw for piece in written) == text
        streamed = pieces(rng, text)
        assert read(family, streamed) == told, (text, streamed)
        num_calls += sum(type(each) is tuple for each in told)
        num_texts += sum(type(each) is str for each in told)
    assert min(num_calls, num_texts) > 80
