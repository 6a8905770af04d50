"""Functions in namespaces: each has one name for the model, and a call of it has the client's names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_worker import Script
from gateway_stack import Stack, running_stack
from waiting import PATIENCE

from gateway.rest.responses.function_names import FunctionName, FunctionNames
from gateway.rest.responses.schemas import OfferedTool

FUNCTION = {"type": "function", "parameters": {"type": "object"}, "strict": False}


def function(name: str) -> dict[str, Any]:
    return {**FUNCTION, "name": name, "description": f"to {name}"}


def namespace(name: str, *functions: str) -> dict[str, Any]:
    tools = [function(each) for each in functions]
    return {"type": "namespace", "name": name, "description": f"of {name}", "tools": tools}


@pytest.fixture(scope="module")
def module_stack(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("names"), model_dir, 4096) as stack:
        yield stack


@pytest.fixture
def stack(module_stack: Stack) -> Stack:
    module_stack.script = Script()
    return module_stack


@pytest.mark.parametrize(
    ("tools", "flat"),
    [
        ([namespace("n", "a", "b")], ["a", "b"]),
        ([function("a"), namespace("n", "a", "b")], ["a", "n__a", "b"]),
        ([namespace("n", "a"), namespace("m", "a")], ["n__a", "m__a"]),
        # a plain name keeps its function, whatever a namespace's would be
        ([namespace("n", "a"), function("a"), function("n__a")], ["n__a_", "a", "n__a"]),
        ([namespace("n", "a_"), namespace("n__a", "b"), function("a_"), function("b")],
         ["n__a_", "n__a__b", "a_", "b"]),
        ([namespace("n", "a__b"), namespace("n__a", "b"), namespace("m", "a__b", "b")],
         ["n__a__b", "n__a__b_", "m__a__b", "m__b"]),
        ([{**namespace("n"), "tools": None}], []),
    ],
)  # fmt: skip
def test_names_are_unique_and_lead_back(tools: list[dict[str, Any]], flat: list[str]) -> None:
    names = FunctionNames(map(OfferedTool.model_validate, tools))
    own = [
        FunctionName(each["name"], tool["name"] if tool is not each else None)
        for tool in tools
        for each in ([tool] if tool["type"] == "function" else tool["tools"] or [])
    ]
    assert [names.flat(each.name, each.namespace) for each in own] == flat
    assert [names.own(each) for each in flat] == own
    assert len(set(flat)) == len(flat)
    assert (names.flat("gone", "n"), names.own("gone")) == ("gone", FunctionName("gone"))


def prompt_of(stack: Stack) -> str:
    return stack.tokenizer.decode(list(stack.script.requests[-1].prompt_token_ids), skip_special_tokens=False)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_has_the_clients_names_and_comes_back_by_them(stack: Stack, is_stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
    tools: Any = [function("find"), namespace("mail", "find", "send")]
    text = '<tool_call>\n{"name": "mail__find", "arguments": {}}\n</tool_call>'
    stack.say(text)
    asked = client.responses.create(model="tiny", input="hi", tools=tools, stream=is_stream)
    response = [*asked][-1].response if is_stream else asked
    [call] = response.output
    assert (call.type, call.name, call.namespace) == ("function_call", "find", "mail")
    assert [tool.type for tool in response.tools] == ["function", "namespace"]
    prompt = prompt_of(stack)
    for name, description in (
        ("find", "to find"),
        ("mail__find", "of mail\nto find"),
        ("send", "of mail\nto send"),
    ):
        assert json.dumps({"name": name, "description": description})[:-1] in prompt
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "none"}
    told = {"model": "tiny", "tools": tools}
    # as a turn that is kept, and as a history that is sent
    stack.say("No mail.")
    client.responses.create(previous_response_id=response.id, input=[output], **told)
    kept = prompt_of(stack)
    history: Any = [{"role": "user", "content": "hi"}, call.model_dump(exclude_none=True), output]
    client.responses.create(input=history, **told)
    assert prompt_of(stack) == kept
    assert f"<|assistant|>{text}<|end|>" in kept


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([namespace("n", "a", "a")], "tools"),
        ([namespace("n", "a"), namespace("n", "a")], "tools"),
        ([namespace(f"n{at}", *(f"f{at}_{number}" for number in range(100))) for at in range(2)], "tools"),
        ([{"type": "namespace", "name": "no name", "tools": []}], "tools.0.name"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "shell"}]}], "tools.0.tools.0.type"),
    ],
)
def test_wrong_namespaces_are_refused(stack: Stack, tools: list[dict[str, Any]], param: str) -> None:
    reply = httpx.post(f"{stack.url}/v1/responses", json={"input": "hi", "tools": tools}, timeout=PATIENCE)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert stack.script.requests == []
