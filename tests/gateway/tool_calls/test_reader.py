"""Calls in answers, however the text is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Set

import pytest
from reference import parts

from gateway.exchange import TextDelta, ToolCallDelta
from gateway.tool_calls import FAMILIES, CallsReader

REX = '{"name": "Rex", "age": 3}'
NO_CALL = '<tool_call>\n{"call": "f"}\n</tool_call> x'
ONE, TWO = ("f", {"x": [1, "}"]}), ("g", {})
HERMES_ONE = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "}"]}}\n</tool_call>'
HERMES_TWO = '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>'
LLAMA_ONE = '{"name": "f", "parameters": {"x": [1, "}"]}}'
MISTRAL_ONE = '{"name": "f", "arguments": {"x": [1, "}"]}}'


def read(
    family: str, pieces: Iterable[str], is_parallel: bool = True, offered: Set[str] = frozenset()
) -> tuple[str, list[tuple[str, str]], list[str]]:
    """An answer's text, the names and arguments of its calls, and their ids."""
    reader = CallsReader(0, FAMILIES[family], is_parallel, offered)
    parts = [part for piece in pieces for part in reader.push(piece)] + list(reader.flush())
    text, names, arguments, ids = "", list[str](), list[str](), list[str]()
    for part in parts:
        match part:
            case TextDelta():
                text += part.text
            case ToolCallDelta() if part.name:
                assert part.place == len(names)
                names.append(part.name)
                arguments.append("")
                ids.append(part.id)
            case ToolCallDelta():
                assert not part.id
                arguments[part.place] += part.arguments
    assert reader.num_calls <= len(names)
    return text, list(zip(names, arguments, strict=True)), ids


@pytest.mark.parametrize(
    ("family", "answer", "text", "calls"),
    [
        ("hermes", "No, \n <tool but no call.\n", "No, \n <tool but no call.\n", []),
        ("hermes", f"I look.\n{HERMES_ONE}\n{HERMES_TWO}\n", "I look.", [ONE, TWO]),
        ("hermes", f"{HERMES_ONE}\nThere.", "There.", [ONE]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": [1, \\"}\\"]}"}</tool_call>', "", [ONE]),
        ("hermes", "<tool_call>\nnothing", "<tool_call>\nnothing", []),
        ("hermes", NO_CALL, NO_CALL, []),
        ("hermes", "Use <tool_call> for calls.", "Use <tool_call> for calls.", []),
        ("hermes", f"I\n{HERMES_ONE[:-13]}\n{HERMES_TWO}", "I", [ONE, TWO]),
        ("hermes", HERMES_ONE.replace("\n</", "}\n</") + " So.", "So.", [ONE]),
        ("hermes", HERMES_ONE.replace("</tool_call>", "and so on"), "and so on", [ONE]),
        ("hermes", f"<tool_call>{REX}</tool_call>", f"<tool_call>{REX}</tool_call>", []),
        ("hermes", '<tool_call>{"name": "g"}</tool_call>', "", [TWO]),
        (
            "hermes",
            '<tool_call>{"name": "a b", "arguments": {}}',
            '<tool_call>{"name": "a b", "arguments": {}}',
            [],
        ),
        ("llama3_json", f"{LLAMA_ONE}; {LLAMA_ONE}", "", [ONE, ONE]),
        ("llama3_json", f"<|python_tag|>{LLAMA_ONE}", "", [ONE]),
        ("llama3_json", 'It is {"name": "f"}.', 'It is {"name": "f"}.', []),
        ("llama3_json", '{"a": {"name": "f"}}', '{"a": {"name": "f"}}', []),
        ("llama3_json", REX, REX, []),
        ("llama3_json", f"{REX}\n\nSo; \n", f"{REX}\n\nSo; \n", []),
        ("llama3_json", f"{LLAMA_ONE}\n\nSo; \n", "So; \n", [ONE]),
        ("llama3_json", f"{LLAMA_ONE}}}; {REX}", f"}}; {REX}", [ONE]),
        ("llama3_json", '{"name": "g", "parameters": null}', "", [TWO]),
        ("mistral", f"[TOOL_CALLS][{MISTRAL_ONE}, {MISTRAL_ONE}]", "", [ONE, ONE]),
        ("mistral", 'Yes.[TOOL_CALLS]f[ARGS]{"x": [1, "}"]}[TOOL_CALLS]g{}', "Yes.", [ONE, TWO]),
        ("mistral", f"[TOOL_CALLS][{MISTRAL_ONE}}}] There.", "There.", [ONE]),
        ("mistral", "[TOOL_CALLS] are calls, x{}", "[TOOL_CALLS] are calls, x{}", []),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{"x": [1, "}"]}', "", [ONE]),
    ],
)
def test_calls_are_told_from_text_however_it_is_cut(
    family: str, answer: str, text: str, calls: list[tuple[str, object]]
) -> None:
    for size in (1, 2, 7, len(answer)):
        pieces = re.findall(f"(?s).{{1,{size}}}", answer)
        found_text, found, ids = read(family, pieces, offered={"f", "g"})
        assert (found_text, [(name, json.loads(of_call)) for name, of_call in found]) == (text, calls), size
        assert len(set(ids)) == len(calls)
    _, told = parts(family, answer, {"f", "g"})
    assert "".join(each for each in told if isinstance(each, str)) == text
    assert [(each[0], json.loads(each[1])) for each in told if not isinstance(each, str)] == calls
    if family == "mistral":
        assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids)


def test_arguments_come_as_they_are_written() -> None:
    reader = CallsReader(3, FAMILIES["hermes"], True)
    parts = [list(reader.push(piece)) for piece in (HERMES_ONE[:40], HERMES_ONE[40:45], HERMES_ONE[45:])]
    assert parts[0][0].id.startswith("call_")
    assert [part.arguments for of_push in parts for part in of_push] == ["", "{", '"x": ', '[1, "}"]}']
    assert {(part.index, part.place) for of_push in parts for part in of_push} == {(3, 0)}


def test_what_is_cut_off_is_told_as_far_as_it_came_and_without_parallel_calls_the_first_alone() -> None:
    assert read("hermes", [HERMES_ONE[:50]])[:2] == ("", [("f", HERMES_ONE[39:50])])
    assert read("hermes", [HERMES_ONE[:20]])[:2] == (HERMES_ONE[:20], [])
    assert read("hermes", [HERMES_ONE, HERMES_TWO], is_parallel=False)[1] == [("f", '{"x": [1, "}"]}')]
