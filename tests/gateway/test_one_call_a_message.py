"""Chat templates that write one call a message, as Llama's: several calls in one answer are taken back all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_stack import Stack, running_stack, write_tokenizer
from waiting import PATIENCE

ASKED = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("time", "weather")]
REFUSES = (
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}"
    "{% endif %}"
)
ONE = '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
EACH = (
    '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}};'
    "{% endfor %}"
)


def template(calls: str) -> str:
    return (
        f"{{% if tools %}}{{{{ tools | length }}}}{{% endif %}}{{% for m in messages %}}<|{{{{ m.role }}}}|>"
        f"{{% if m.tool_calls %}}{{{{ m.content }}}}{calls}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
        "<|assistant|>"
    )


def second_turn(stack: Stack, messages: list[dict[str, Any]]) -> str:
    stack.say("x")
    answer = httpx.post(
        f"{stack.url}/v1/chat/completions", json={"messages": messages, "tools": TOOLS}, timeout=PATIENCE
    )
    assert answer.status_code == 200, answer.text
    return stack.tokenizer.decode(list(stack.script.requests[0].prompt_token_ids), skip_special_tokens=False)


@pytest.mark.parametrize("calls", [REFUSES + ONE, ONE], ids=["refuses", "drops"])
def test_calls_are_written_one_by_one_each_before_its_answer(tmp_path: Path, calls: str) -> None:
    folder = write_tokenizer(tmp_path / "model", template(calls))
    with running_stack(tmp_path, folder, 2048, tool_call_parser="llama3_json") as stack:
        stack.say('{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"city": "Rome"}}')
        answer = httpx.post(
            f"{stack.url}/v1/chat/completions", json={"messages": [ASKED], "tools": TOOLS}, timeout=PATIENCE
        ).json()
        message = answer["choices"][0]["message"]
        first, second = message["tool_calls"]
        answers = [
            {"role": "tool", "tool_call_id": second["id"], "content": "rain"},
            {"role": "tool", "tool_call_id": first["id"], "content": "noon"},
            {"role": "tool", "tool_call_id": "another", "content": "?"},
        ]
        said = {**message, "content": "I look."}
        assert second_turn(stack, [ASKED, said, *answers, {"role": "user", "content": "so?"}]) == (
            '2<|user|>hi<|assistant|>I look.{"name": "time", "parameters": {}}<|tool|>noon'
            '<|assistant|>{"name": "weather", "parameters": {"city": "Rome"}}<|tool|>rain<|tool|>?'
            "<|user|>so?<|assistant|>"
        )
        # calls of one id, and calls that nothing answers
        same = {**message, "content": None, "tool_calls": [first, {**second, "id": first["id"]}]}
        assert second_turn(stack, [ASKED, same, answers[1], message]) == (
            '2<|user|>hi<|assistant|>{"name": "time", "parameters": {}}<|tool|>noon'
            '<|assistant|>{"name": "weather", "parameters": {"city": "Rome"}}'
            '<|assistant|>{"name": "time", "parameters": {}}'
            '<|assistant|>{"name": "weather", "parameters": {"city": "Rome"}}<|assistant|>'
        )


def test_a_template_that_takes_several_calls_gets_them_in_one_message(tmp_path: Path) -> None:
    with running_stack(tmp_path, write_tokenizer(tmp_path / "model", template(EACH)), 2048) as stack:
        calls = [
            {
                "id": f"c{at}",
                "type": "function",
                "function": {"name": "time", "arguments": json.dumps({"a": at})},
            }
            for at in range(2)
        ]
        messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
        assert second_turn(stack, messages) == (
            '2<|user|>hi<|assistant|>{"name": "time", "parameters": {"a": 0}};{"name": "time", "parameters": {"a": 1}};'
            "<|assistant|>"
        )
