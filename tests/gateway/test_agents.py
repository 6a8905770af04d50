"""Coding agents, unchanged: what Codex, Claude Code and opencode send passes for two turns with a call of a tool."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_stack import CHAT, MESSAGE, RESPONSE, Stack, running_stack
from waiting import PATIENCE

from gateway.rest.hints import HEADER

MAX_MODEL_LEN = 8192
LISTING = "README.md\nsrc"
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}


def call_text(name: str) -> str:
    call = json.dumps({"name": name, "arguments": {"cmd": "ls"}})
    return f"<tool_call>\n{call}\n</tool_call>"


def codex(model: str) -> dict[str, Any]:
    def said(role: str, *texts: str) -> dict[str, Any]:
        parts = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}

    def function(name: str) -> dict[str, Any]:
        return {"type": "function", "name": name, "description": "x", "strict": False, "parameters": SCHEMA}

    agents = {"type": "namespace", "name": "agents_v1", "description": "Sub-agents."}
    return {
        "model": model,
        "stream": True,
        "input": [said("developer", "Be brief."), said("user", "<cwd>/w</cwd>"), said("user", "List files.")],
        "tools": [
            function("exec_command"),
            function("view_image"),
            {**agents, "tools": [function("spawn_agent"), function("wait_agent")]},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
            {"type": "tool_search", "execution": "client", "description": "x", "parameters": SCHEMA},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread-1",
        "client_metadata": {"thread_id": "thread-1", "window": "0"},
    }


def codex_goes_on(body: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": LISTING}
    reasoning = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    return {**body, "input": [*body["input"], reasoning, *items, output]}


def codex_call(events: list[dict[str, Any]]) -> tuple[str, str]:
    *_, item = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.completed"
    return f"{item['namespace']}/{item['name']}", item["arguments"]


def claude(model: str) -> dict[str, Any]:
    cached = {"cache_control": {"type": "ephemeral"}}
    tools = [{"name": name, "description": "x", "input_schema": SCHEMA} for name in ("Bash", "Read")]
    return {
        "model": model,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "List files."}]},
            {
                "role": "system",
                "content": [{"type": "text", "text": "# Environment", **cached}],
                "output_config": {"effort": "medium"},
            },
        ],
        "system": [{"type": "text", "text": "Be brief.", **cached}],
        "tools": [
            *tools,
            {"name": "Placeholder", "input_schema": {"type": "object"}, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": '{"session_id": "1"}'},
        "max_tokens": 512,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }


def claude_blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks = [{**event["content_block"]} for event in events if event["type"] == "content_block_start"]
    for event in events:
        match event:
            case {"index": index, "delta": {"partial_json": piece}}:
                blocks[index]["input"] = blocks[index]["input"] or ""
                blocks[index]["input"] += piece
            case {"index": index, "delta": {"text": piece}}:
                blocks[index]["text"] += piece
    return [
        {**block, "input": json.loads(block["input"])} if block["type"] == "tool_use" else block
        for block in blocks
    ]


def claude_goes_on(body: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks = claude_blocks(events)
    content = [{"type": "text", "text": LISTING}]
    result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": content}
    thinking = {"type": "thinking", "thinking": "so", "signature": "x"}
    turns = [{"role": "assistant", "content": [thinking, *blocks]}, {"role": "user", "content": [result]}]
    return {**body, "messages": [*body["messages"], *turns]}


def claude_call(events: list[dict[str, Any]]) -> tuple[str, str]:
    block = claude_blocks(events)[-1]
    return block["name"], json.dumps(block["input"])


def opencode(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": 512,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "List files."}],
        "tools": [
            {"type": "function", "function": {"name": name, "description": "x", "parameters": SCHEMA}}
            for name in ("bash", "read")
        ],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "high",
        "prompt_cache_key": "ses_1",
    }


def opencode_calls(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    parts = [part for delta in deltas for part in delta.get("tool_calls") or []]
    arguments = "".join(part["function"].get("arguments") or "" for part in parts)
    function = {"name": parts[0]["function"]["name"], "arguments": arguments}
    return [{"id": parts[0]["id"], "type": "function", "function": function}]


def opencode_goes_on(body: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    calls = opencode_calls(events)
    answer = {"role": "tool", "tool_call_id": calls[0]["id"], "content": LISTING}
    turns = [{"role": "assistant", "content": "I look.", "tool_calls": calls}, answer]
    return {**body, "messages": [*body["messages"], *turns]}


def opencode_call(events: list[dict[str, Any]]) -> tuple[str, str]:
    function = opencode_calls(events)[0]["function"]
    return function["name"], function["arguments"]


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    asks, goes_on: the bodies of its first and of its second request. call: the name and arguments that it reads.
    model: the name that it asks for by itself. tool: what the model calls, and `named` what the agent is to read.
    param: what a strict server refuses first.
    """

    path: str
    asks: Any
    goes_on: Any
    call: Any
    model: str
    tool: str
    named: str
    ignored: str
    param: str
    session: str


AGENTS = {
    "codex": Agent(
        RESPONSE, codex, codex_goes_on, codex_call, "gpt-5.5", "spawn_agent", "agents_v1/spawn_agent",
        "client_metadata, text.verbosity, reasoning.effort, reasoning.summary, include.reasoning.encrypted_content, "
        "tools.custom, tools.tool_search, tools.web_search",
        "text.verbosity", "thread-1",
    ),
    "claude code": Agent(
        MESSAGE, claude, claude_goes_on, claude_call, "claude-opus-5-5", "Bash", "Bash",
        "metadata, context_management, output_config.effort, thinking, tools.web_search, tools.defer_loading",
        "tools.2.defer_loading", "",
    ),
    "opencode": Agent(
        CHAT, opencode, opencode_goes_on, opencode_call, "tiny", "bash", "bash", "reasoning_effort",
        "reasoning_effort", "ses_1",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    values = {"served_model_aliases": ("claude-*", "gpt-*")}
    with running_stack(tmp_path_factory.mktemp("agents"), model_dir, MAX_MODEL_LEN, **values) as stack:
        yield stack


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("strict")
    with running_stack(folder, model_dir, MAX_MODEL_LEN, strict_fields=True) as stack:
        yield stack


def post(stack: Stack, path: str, body: dict[str, Any]) -> tuple[httpx.Response, list[dict[str, Any]]]:
    reply = httpx.post(stack.url + path, json=body, timeout=PATIENCE)
    return reply, [json.loads(data) for data in re.findall(r"^data: (\{.*)$", reply.text, re.MULTILINE)]


def prompt_of(stack: Stack) -> str:
    return stack.tokenizer.decode(list(stack.script.requests[-1].prompt_token_ids), skip_special_tokens=False)


@pytest.mark.parametrize("name", AGENTS)
def test_two_turns_with_a_call(stack: Stack, name: str) -> None:
    agent = AGENTS[name]
    body = agent.asks(agent.model)
    stack.say(f"I look.\n{call_text(agent.tool)}")
    reply, events = post(stack, agent.path, body)
    assert reply.status_code == 200, reply.text
    assert reply.headers[HEADER] == agent.ignored
    assert agent.call(events) == (agent.named, '{"cmd": "ls"}')
    prompt = prompt_of(stack)
    assert f'"name": "{agent.tool}"' in prompt
    assert not re.search("web_search|apply_patch|tool_search", prompt)
    assert stack.script.requests[-1].session_id == agent.session

    stack.say("There are two.")
    reply, events = post(stack, agent.path, agent.goes_on(body, events))
    assert reply.status_code == 200, reply.text
    pieces = re.findall(r'"(?:delta|text|content)":\s*"([^"]*)"', reply.text)
    assert "There are two." in "".join(pieces)
    said = f"I look.\n{call_text(agent.tool)}<|end|><|user|><tool_response>\n{LISTING}\n</tool_response>"
    assert said in prompt_of(stack)
    assert stack.script.requests[-1].session_id == agent.session


@pytest.mark.parametrize("name", AGENTS)
def test_a_strict_server_refuses_it(strict: Stack, name: str) -> None:
    agent = AGENTS[name]
    reply, _ = post(strict, agent.path, agent.asks("tiny"))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, agent.param)
    assert strict.script.requests == []


def test_claude_code_counts_what_it_would_send(stack: Stack) -> None:
    body = claude("claude-opus-5-5")
    stack.say("the fox")
    post(stack, MESSAGE, body)
    counted = {
        name: value for name, value in body.items() if name not in ("max_tokens", "metadata", "stream")
    }
    reply, _ = post(stack, "/v1/messages/count_tokens", counted)
    assert reply.json() == {"input_tokens": len(stack.script.requests[-1].prompt_token_ids)}
    assert reply.headers[HEADER] == AGENTS["claude code"].ignored.removeprefix("metadata, ")


def test_a_reference_to_a_tool_is_its_name(stack: Stack) -> None:
    found = [{"type": "tool_reference", "tool_name": "Read"}, {"type": "tool_reference", "tool_name": "Bash"}]
    call = {"type": "tool_use", "id": "1", "name": "Search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": found}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = claude("tiny")
    stack.say("the fox")
    reply, _ = post(stack, MESSAGE, {**body, "messages": [*body["messages"], *turns]})
    assert reply.status_code == 200, reply.text
    assert "<tool_response>\nRead\nBash\n</tool_response>" in prompt_of(stack)
