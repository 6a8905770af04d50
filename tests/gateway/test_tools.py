"""Tools, calls and reasoning of chats: what the model is told, what the worker is asked, and what the client gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pydantic
import pytest
from fake_worker import Script
from gateway_stack import Stack, running_stack, write_tokenizer
from waiting import PATIENCE

from gateway.v1 import chat_pb2, chat_pb2_grpc

CHAT = "/v1/chat/completions"
ASKED = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "now", "parameters": PARAMETERS},
}
TIME = {"type": "function", "function": {"name": "time"}}
STRICT = {"type": "function", "function": {"name": "time", "strict": True}}


def named(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
# writes tools, calls and thoughts itself, and begins an answer within a thought if it is asked to
OWN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}#{{ c.id }}{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}<|assistant|>{% if thinks %}<think>\n{% endif %}{{ reasoning_effort }}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    """A template that knows no tools."""
    with running_stack(tmp_path_factory.mktemp("plain"), model_dir, 2048) as stack:
        yield stack


@pytest.fixture
def stack(plain: Stack) -> Stack:
    plain.script = Script()
    return plain


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("own")
    with running_stack(folder, write_tokenizer(folder / "model", OWN), 2048) as stack:
        yield stack


def post(stack: Stack, **body: Any) -> dict[str, Any]:
    answer = httpx.post(stack.url + CHAT, json={"messages": [ASKED], **body}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(stack: Stack) -> str:
    prompt = list(stack.script.requests[0].prompt_token_ids)
    return stack.tokenizer.decode(prompt, skip_special_tokens=False)


def test_a_loop_of_two_turns_with_the_openai_package(client: openai.OpenAI, stack: Stack) -> None:
    stack.say(f"I look.\n{CALL}")
    messages: list[Any] = [ASKED]
    arguments: dict[str, Any] = {"model": "tiny", "tools": [WEATHER, TIME]}
    first = client.chat.completions.create(messages=messages, **arguments).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", "I look.")
    (call,) = first.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Rome"},
    )
    # a template that knows no tools gets them as text
    prompt = prompt_of(stack)
    assert prompt.startswith("<|bos|><|system|>")
    assert json.dumps(WEATHER["function"]) in prompt
    assert '"name": "time"' in prompt
    stack.say("It rains.")
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    second = client.chat.completions.create(messages=messages, **arguments).choices[0]
    assert (second.finish_reason, second.message.content, second.message.tool_calls) == (
        "stop",
        "It rains.",
        None,
    )
    turns = f"<|assistant|>I look.\n{CALL}<|end|><|user|><tool_response>\nrain\n</tool_response><|end|>"
    assert prompt_of(stack).endswith(f"{turns}<|assistant|>")


def test_calls_stream_with_their_names_first(client: openai.OpenAI, stack: Stack) -> None:
    stack.say(f"I look.\n{CALL}\n{CALL.replace('weather', 'time')}")
    with client.chat.completions.stream(model="tiny", messages=[ASKED], tools=[WEATHER, TIME]) as stream:
        deltas = [event.chunk.choices[0].delta for event in stream if event.type == "chunk"]
        message = stream.get_final_completion().choices[0]
    told = [call for delta in deltas for call in delta.tool_calls or []]
    begun = [call for call in told if call.id]
    assert [(call.index, call.function.name, call.function.arguments) for call in begun] == [
        (0, "weather", ""),
        (1, "time", ""),
    ]
    assert len(told) > 6
    assert (message.finish_reason, message.message.content) == ("tool_calls", "I look.")
    assert [call.function.arguments for call in message.message.tool_calls] == ['{"city": "Rome"}'] * 2
    assert [call.id for call in message.message.tool_calls] == [call.id for call in begun]


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"tool_choice": "required"}, ['"const": "weather"', '"const": "time"', "call)*"]),
        ({"tool_choice": {"type": "function", "function": {"name": "time"}}}, ['"const": "time"']),
        (
            {"response_format": {"type": "json_object"}},
            ["start: calls | answer", '"const": "weather"', "answer: %json"],
        ),
        ({"tools": [WEATHER, STRICT]}, ["begun[lazy]", '"const": "weather"']),
    ],
)
def test_a_call_that_must_be_is_held_to_a_grammar(
    stack: Stack, fields: dict[str, Any], parts: list[str]
) -> None:
    stack.say(CALL)
    message = post(stack, **{"tools": [WEATHER, TIME], **fields})["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "weather"
    grammar = stack.script.requests[0].grammar
    assert grammar.param == "tools"
    assert all(part in grammar.ebnf for part in parts)
    assert "time" in prompt_of(stack)
    assert ("weather" in grammar.ebnf) == ('"const": "weather"' in parts)


def test_a_tool_that_is_named_is_called_once(client: openai.OpenAI, stack: Stack) -> None:
    script = stack.say(f"{CALL}\n{CALL}")
    named: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
    fields: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": named}
    message = post(stack, **fields)["choices"][0]["message"]
    flat = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
    answer = client.responses.create(
        model="tiny", input="hi", tools=flat, tool_choice={"type": "function", "name": "weather"}
    )
    tools = [chat_pb2.Tool(name="weather"), chat_pb2.Tool(name="time")]
    events = over_grpc(stack, tools=tools, tool_name="weather")
    begun = [event.delta.tool_call.name for event in events if event.delta.tool_call.name]
    assert len(message["tool_calls"]) == len(answer.output) == len(begun) == 1
    assert len(script.requests) == 3
    assert not any("call)*" in request.grammar.ebnf for request in script.requests)
    # where any may be, there may be several
    assert (
        len(post(stack, **fields | {"tool_choice": "required"})["choices"][0]["message"]["tool_calls"]) == 2
    )


def only_weather(mode: str) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": "weather"}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_knows_the_tools_that_are_allowed_and_no_others(
    client: openai.OpenAI, stack: Stack, mode: str
) -> None:
    stack.say(CALL)
    arguments: dict[str, Any] = {"model": "tiny", "messages": [ASKED], "tools": [WEATHER, TIME]}
    reply = client.chat.completions.create(tool_choice=only_weather(mode), **arguments)
    assert reply.choices[0].finish_reason == "tool_calls"
    assert "weather" in prompt_of(stack)
    assert "time" not in prompt_of(stack)
    assert stack.script.requests[0].HasField("grammar") == (mode == "required")
    stack.say(CALL)
    flat = [{"type": "function", **each["function"]} for each in (WEATHER, TIME)]
    chosen = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "weather"}]}
    answer = client.responses.create(model="tiny", input="hi", tools=flat, tool_choice=chosen)
    assert answer.tool_choice.mode == mode
    assert "time" not in prompt_of(stack)


def test_without_tools_or_with_none_to_be_called_an_answer_is_text(stack: Stack) -> None:
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}):
        stack.say(CALL)
        choice = post(stack, **fields)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "weather" not in prompt_of(stack)
        assert not stack.script.requests[0].HasField("grammar")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": only_weather("auto")}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [TIME], "guided_regex": "a"}, "guided_regex"),
        ({"tools": [TIME], "tool_choice": "required", "guided_json": {}}, "guided_json"),
        ({"tools": [named("x", {"type": "string"})], "tool_choice": "required"}, "tools"),
        ({"tools": [named("x", {"enum": ["a"]}), TIME], "guided_json": {}}, "tools"),
        (
            {
                "tools": [
                    TIME,
                    {**STRICT, "function": {**STRICT["function"], "name": "x", "parameters": {"const": 3}}},
                ]
            },
            "tools",
        ),
        ({"tools": [TIME], "guided_json": "[1]"}, "guided_json"),
        ({"tools": [TIME], "guided_json": "[" * 100_000}, "guided_json"),
        ({"tools": [TIME], "guided_json": "[" * 200_000}, "guided_json"),
        ({"functions": [{"name": "time"}]}, "functions"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(
    http: httpx.Client, stack: Stack, fields: dict[str, Any], param: str
) -> None:
    answer = http.post(CHAT, json={"messages": [ASKED], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not stack.script.requests


def nested(key: str, depth: int) -> str:
    return f'{{"{key}": ' * depth + "{}" + "}" * depth


@pytest.mark.parametrize("depth", [150, 300, 450, 900, 20_000])
def test_what_is_nested_too_deeply_for_a_template_or_a_grammar_is_refused(own: Stack, depth: int) -> None:
    own.say("x")
    call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": nested("a", depth)}}
    body = {"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]}
    assert httpx.post(own.url + CHAT, json=body, timeout=PATIENCE).status_code in (200, 400, 413)
    tool = chat_pb2.Tool(name="time", parameters=nested("additionalProperties", depth))
    for choice in (chat_pb2.TOOL_CHOICE_AUTO, chat_pb2.TOOL_CHOICE_REQUIRED):
        request = chat_pb2.ChatRequest(messages=[chat_pb2.Message(**ASKED)], tools=[tool], tool_choice=choice)
        with grpc.insecure_channel(own.grpc_target) as channel:
            events = chat_pb2_grpc.ChatStub(channel).Complete(request, timeout=PATIENCE)
            with suppress(grpc.RpcError):
                list(events)
            assert events.code().name in ("OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")


def test_a_template_that_knows_tools_gets_them_and_calls_as_objects(own: Stack) -> None:
    own.say("x")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    post(own, messages=messages, tools=[WEATHER])
    assert json.loads(prompt_of(own).partition("<|user|>")[0]) == [WEATHER]
    assert prompt_of(own).endswith("<|user|>hi<|assistant|><tool_call>Rome#c1<|tool|>7c1<|assistant|>")


def test_an_effort_of_reasoning_is_the_templates(own: Stack) -> None:
    own.say("the")
    post(own, reasoning_effort="low")
    assert prompt_of(own).endswith("<|assistant|>low")


@pytest.mark.parametrize(
    ("answer", "fields", "reasoning", "content"),
    [
        ("<think>\nLet me see.\n</think>\n\nIt is 7.", {}, "Let me see.", "It is 7."),
        (
            "Let me see.\n</think>\nIt is 7.",
            {"chat_template_kwargs": {"thinks": True}},
            "Let me see.",
            "It is 7.",
        ),
        ("<think>Hm.</think>It is 7.", {"include_reasoning": False}, "", "It is 7."),
        ("<think>Hm.", {"include_reasoning": False}, "", ""),
        ("Let me", {"chat_template_kwargs": {"thinks": True}}, "Let me", ""),
        ("No <think> here.", {}, "", "No <think> here."),
        ('{"a": "<think>"}', {"response_format": {"type": "json_object"}}, "", '{"a": "<think>"}'),
        (f"<think>Hm.</think>{CALL}", {"tools": [WEATHER, STRICT]}, "Hm.", ""),
    ],
)
def test_what_the_model_thinks_comes_apart(
    own: Stack, answer: str, fields: dict[str, Any], reasoning: str, content: str
) -> None:
    own.say(answer)
    message = post(own, **fields)["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"] or "") == (reasoning, content)
    with openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        chunks = client.chat.completions.create(
            model="tiny", messages=[ASKED], stream=True, extra_body=fields
        )
        deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.model_extra.get("reasoning_content") or "" for delta in deltas) == reasoning
    assert "".join(delta.content or "" for delta in deltas) == content
    assert any(delta.tool_calls for delta in deltas) == ("tools" in fields)


def test_a_loop_of_two_turns_with_the_anthropic_package(stack: Stack) -> None:
    claude = anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=PATIENCE)
    tools = [
        {"name": "weather", "description": "now", "input_schema": PARAMETERS},
        {"name": "time", "input_schema": {"type": "object"}},
    ]
    arguments: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "tools": tools}
    stack.say(f"I look.\n{CALL}")
    first = claude.messages.create(messages=[ASKED], **arguments)
    said, call = first.content
    assert (first.stop_reason, said.text, call.name, call.input) == (
        "tool_use",
        "I look.",
        "weather",
        {"city": "Rome"},
    )
    assert json.dumps(PARAMETERS) in prompt_of(stack)
    counted = claude.messages.count_tokens(model="tiny", messages=[ASKED], tools=tools)
    assert counted.input_tokens == len(stack.script.requests[0].prompt_token_ids)
    with claude.messages.stream(messages=[ASKED], **arguments) as stream:
        kinds = [event.type for event in stream if "block_st" in event.type]
        streamed = stream.get_final_message()
    assert kinds == ["content_block_start", "content_block_stop"] * 2
    assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
        block.model_dump(exclude={"id"}) for block in first.content
    ]
    stack.say("It rains.")
    answer = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    messages = [
        ASKED,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [answer, {"type": "text", "text": "so?"}]},
    ]
    second = claude.messages.create(messages=messages, **arguments)
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "It rains.")
    turns = f"<|assistant|>I look.\n{CALL}<|end|><|user|><tool_response>\nrain\n</tool_response>"
    assert turns in prompt_of(stack)
    assert prompt_of(stack).endswith("<|user|>so?<|end|><|assistant|>")
    stack.say(CALL)
    forced = {"type": "tool", "name": "weather"}
    claude.messages.create(messages=[ASKED], tool_choice=forced, **arguments)
    assert stack.script.requests[0].HasField("grammar")


def test_thoughts_are_blocks_of_a_message(own: Stack) -> None:
    claude = anthropic.Anthropic(base_url=own.url, api_key="none", max_retries=0, timeout=PATIENCE)
    own.say("<think>\nso\n</think>\nyes")
    arguments: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "messages": [ASKED]}
    whole = claude.messages.create(**arguments)
    with claude.messages.stream(**arguments) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thought, said = message.content
        assert (thought.type, thought.thinking.strip(), said.text.strip()) == ("thinking", "so", "yes")


def test_a_loop_of_two_turns_over_responses(client: openai.OpenAI, stack: Stack) -> None:
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in (WEATHER, TIME)]
    arguments: dict[str, Any] = {"model": "tiny", "tools": tools}
    script = stack.say(f"I look.\n{CALL}")
    first = client.responses.create(input="hi", **arguments)
    said, call = first.output
    assert (first.output_text, call.type, call.name) == ("I look.", "function_call", "weather")
    assert (json.loads(call.arguments), call.status) == ({"city": "Rome"}, "completed")
    assert json.dumps(WEATHER["function"]) in prompt_of(stack)
    events = list(client.responses.create(input="hi", stream=True, **arguments))
    kinds = [event.type.removeprefix("response.") for event in events if "delta" not in event.type]
    assert kinds[6:] == [
        "output_item.done", "output_item.added", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) == {"city": "Rome"}
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    asked = [{"role": "user", "content": "hi"}, said.model_dump(), call.model_dump(), answer]
    prompts = []
    # what was kept, and the same sent again
    for fields in ({"input": [answer], "previous_response_id": first.id}, {"input": asked}):
        stack.say("It rains.")
        assert client.responses.create(**fields, **arguments).output_text == "It rains."
        prompts.append(prompt_of(stack))
    assert prompts[0] == prompts[1]
    assert f"<|assistant|>I look.\n{CALL}<|end|><|user|><tool_response>\nrain\n</tool_response>" in prompts[0]
    assert not script.requests[0].HasField("grammar")
    for fields in ({"tool_choice": {"type": "function", "name": "weather"}}, {"tool_choice": "required"}):
        stack.say(CALL)
        client.responses.create(input="hi", **fields, **arguments)
        assert stack.script.requests[0].HasField("grammar")


def test_a_response_parses_into_a_model(client: openai.OpenAI, stack: Stack) -> None:
    class Place(pydantic.BaseModel):
        city: str

    script = stack.say('{"city": "Rome"}')
    parsed = client.responses.parse(model="tiny", input="hi", text_format=Place)
    assert parsed.output_parsed == Place(city="Rome")
    assert json.loads(script.requests[0].grammar.json_schema)["required"] == ["city"]


def over_grpc(stack: Stack, **fields: Any) -> list[chat_pb2.ChatEvent]:
    request = chat_pb2.ChatRequest(**{"messages": [chat_pb2.Message(**ASKED)], **fields})
    with grpc.insecure_channel(stack.grpc_target) as channel:
        return list(chat_pb2_grpc.ChatStub(channel).Complete(request, timeout=PATIENCE))


def test_chat_grpc_has_tools_calls_and_thoughts_as_rest(own: Stack) -> None:
    called = {"name": "weather", "arguments": '{"city": "Rome"}'}
    rest = {
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c1", "type": "function", "function": called}],
            },
            {"role": "tool", "content": "7", "tool_call_id": "c1"},
        ],
        "tools": [WEATHER, STRICT],
        "chat_template_kwargs": {"thinks": True},
    }
    messages = [
        chat_pb2.Message(**ASKED),
        chat_pb2.Message(role="assistant", tool_calls=[chat_pb2.ToolCall(id="c1", **called)]),
        chat_pb2.Message(role="tool", content="7", tool_call_id="c1"),
    ]
    tools = [
        chat_pb2.Tool(name="weather", description="now", parameters=json.dumps(PARAMETERS)),
        chat_pb2.Tool(name="time", strict=True),
    ]
    script = own.say(f"Let me see.</think>I look.\n{CALL}")
    events = over_grpc(own, messages=messages, tools=tools, chat_template_kwargs={"thinks": True})
    message = post(own, **rest)["choices"][0]["message"]
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert "".join(delta.reasoning_content for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.content for delta in deltas) == message["content"] == "I look."
    calls = [delta.tool_call for delta in deltas if delta.HasField("tool_call")]
    assert (calls[0].name, calls[0].id[:5]) == ("weather", "call_")
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Rome"}
    assert list(events[-1].complete.finish_reasons) == ["tool_calls"]

    same = {"tools": [WEATHER, TIME], "parallel_tool_calls": False}
    named = [tools[0], chat_pb2.Tool(name="time")]
    for fields, as_rest in (
        ({"tool_choice": chat_pb2.TOOL_CHOICE_REQUIRED}, "required"),
        ({"tool_choice": chat_pb2.TOOL_CHOICE_NONE}, "none"),
        ({"tool_name": "time"}, {"type": "function", "function": {"name": "time"}}),
    ):
        over_grpc(own, tools=named, parallel_tool_calls=False, **fields)
        post(own, tool_choice=as_rest, **same)
    for asked in script.requests:
        asked.request_id = ""
    assert script.requests[::2] == script.requests[1::2]


def test_chat_grpc_holds_answers_to_grammars_as_rest(stack: Stack) -> None:
    script = stack.say("x")
    for kind, value in (
        ("json", '{"type": "object"}'),
        ("json_object", True),
        ("regex", "a+"),
        ("choice", ["a", "b"]),
        ("grammar", 'start: "a"'),
    ):
        told = {"texts": value} if kind == "choice" else value
        over_grpc(stack, structured_outputs={kind: told})
        post(stack, structured_outputs={kind: value})
    over_grpc(stack, json_schema="{}")
    post(stack, structured_outputs={"json": "{}"})
    *same, (over, rest) = zip(script.requests[::2], script.requests[1::2], strict=True)
    assert all(over.grammar == rest.grammar and over.HasField("grammar") for over, rest in same)
    assert over.grammar.json_schema == rest.grammar.json_schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": chat_pb2.TOOL_CHOICE_REQUIRED}, "tool_choice"),
        ({"tool_choice": 9}, "tool_choice"),
        ({"tools": [{"name": "a b"}]}, "tools"),
        ({"tools": [{"name": "a", "parameters": "[1]"}]}, "tools"),
        ({"tools": [{"name": "a", "parameters": "[" * 9999}]}, "tools"),
        ({"tools": [{"name": "a"}] * 129}, "tools"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": {}}}, "structured_outputs.choice"),
        ({"json_schema": "{}", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
    ],
)
def test_chat_grpc_refuses_what_it_cannot_hold(stack: Stack, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        over_grpc(stack, **fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["carrel-param"] == param
    assert not stack.script.requests
