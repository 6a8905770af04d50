"""Fields that are wrong, or not served, are refused by their names by each API, and the worker is not asked."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from gateway_stack import ASKED, CHAT, COMPLETION, HELLO, MESSAGE, RESPONSE, Stack

EVERY = tuple(ASKED)
OPENAI = (CHAT, COMPLETION)


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


# the APIs, fields of their bodies, and the name in the error
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (EVERY, {"model": 5}, "model"),
    (EVERY, {"temperature": "hot"}, "temperature"),
    (EVERY, {"top_p": -1}, "top_p"),
    (EVERY, {"stream": "maybe"}, "stream"),
    (EVERY, {"priority": "first"}, "priority"),
    (EVERY, {"timeout_seconds": 0}, "timeout_seconds"),
    *[(EVERY, {"cache_salt": salt}, "cache_salt") for salt in ("", "x" * 257, "a\x00b")],
    (EVERY, {"carrel": 5}, "carrel"),
    (EVERY, {"carrel": {"policy": "magic"}}, "carrel.policy"),
    (EVERY, {"carrel": {"unknown": 5}}, "carrel.unknown"),
    (EVERY, {"carrel": {"options": {"a" * (i + 1): 1 for i in range(17)}}}, "carrel.options"),
    (EVERY, {"carrel": {"options": 5}}, "carrel.options"),
    *[
        (EVERY, {"carrel": {"budget": budget}}, "carrel.budget")
        for budget in (0, -1, -0.5, 1.5, 2.5, "0.5", True, [1], {"share": 1})
    ],
    *[((*OPENAI, MESSAGE), {"session_id": name}, "session_id") for name in ("", "x" * 129, "a\x00b")],
    ((*OPENAI, MESSAGE), {"top_k": 1.5}, "top_k"),
    (OPENAI, {"max_tokens": 2**70}, "max_tokens"),
    (OPENAI, {"max_tokens": 5.5}, "max_tokens"),
    (OPENAI, {"max_completion_tokens": -1}, "max_completion_tokens"),
    (OPENAI, {"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    *[(OPENAI, {"stop": stop}, "stop") for stop in (["x"] * 17, "", "x" * 10_000)],
    (OPENAI, {"logit_bias": {"x": 1}}, "logit_bias.x"),
    (OPENAI, {"logit_bias": {"99999": 1}}, "logit_bias"),
    *[(OPENAI, {"stop_token_ids": ids}, "stop_token_ids") for ids in ([99999], [1] * 65)],
    (OPENAI, {"stream_options": {"include_usage": True}}, "stream_options"),
    (OPENAI, {"stream": True, "stream_options": {"include_progress": 2}}, "stream_options.include_progress"),
    *[(OPENAI, {"truncate_prompt_tokens": kept}, "truncate_prompt_tokens") for kept in (0, -2)],
    (OPENAI, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    (OPENAI, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (OPENAI, {"bad_words": ["a"]}, "bad_words"),
    (OPENAI, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    # what an answer must be
    (OPENAI, {"response_format": {"type": "structural_tag"}}, "response_format"),
    (OPENAI, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    (OPENAI, {"structured_outputs": {}}, "structured_outputs"),
    (OPENAI, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    (OPENAI, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    (OPENAI, {"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
    (OPENAI, {"guided_choice": []}, "guided_choice"),
    (OPENAI, {"guided_regex": "a" * 200_000}, "guided_regex"),
    ((COMPLETION,), {"max_completion_tokens": 0}, "max_completion_tokens"),
    ((CHAT,), {"messages": []}, "messages"),
    ((CHAT,), {"messages": "hello"}, "messages"),
    *[((CHAT,), said("x", role), "messages") for role in ("pirate", "")],
    ((CHAT,), {"messages": [{"role": "user"}]}, "messages"),
    ((CHAT,), said(5), "messages.0.content"),
    ((CHAT,), said("a\x00b"), "messages"),
    ((CHAT,), said([{"type": "image_url", "image_url": {"url": "x"}}]), "messages"),
    ((CHAT,), {"max_tokens": 2**31}, "messages"),
    ((CHAT,), {"top_logprobs": 2}, "top_logprobs"),
    ((CHAT,), {"tools": [{"type": "function"}]}, "tools.0.function"),
    ((CHAT,), {"tool_choice": "required"}, "tool_choice"),
    ((CHAT,), {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ((CHAT,), {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ((CHAT,), {"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ((CHAT,), {"stop_sequences": ["a"]}, "stop_sequences"),
    ((CHAT,), {"modalities": ["text", "audio"]}, "modalities"),
    ((CHAT,), {"messages": [{**HELLO[0], "function_call": {"name": "f"}}]}, "messages.0.function_call"),
    ((RESPONSE,), {"tools": [{"type": "shell"}]}, "tools.0.type"),
    ((RESPONSE,), {"tools": [{"type": "function", "name": "f", "async": True}]}, "tools.0.async"),
    ((RESPONSE,), {"tool_choice": "required"}, "tool_choice"),
    *[((RESPONSE,), {"text": {"format": {"type": kind}}}, "text.format") for kind in ("xml", "json_schema")],
    ((RESPONSE,), {"background": True}, "background"),
    ((RESPONSE,), {"conversation": "conv_1"}, "conversation"),
    ((RESPONSE,), {"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    ((RESPONSE,), {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ((RESPONSE,), {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    ((RESPONSE,), {"top_logprobs": 2}, "top_logprobs"),
    ((RESPONSE,), {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ((RESPONSE,), {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ((RESPONSE,), {"input": []}, "input"),
    ((RESPONSE,), {"max_output_tokens": -1}, "max_output_tokens"),
    ((RESPONSE,), {"max_tokens": 5}, "max_tokens"),
    ((RESPONSE, MESSAGE), {"seed": 5}, "seed"),
    ((MESSAGE,), {"tools": [{"type": "memory_20250818", "name": "memory"}]}, "tools.0.type"),
    (
        (MESSAGE,),
        {"tools": [{"name": "f", "input_schema": {}, "input_examples": [{}]}]},
        "tools.0.input_examples",
    ),
    ((MESSAGE,), {"tool_choice": {"type": "any"}}, "tool_choice"),
    ((MESSAGE,), said([{"type": "tool_result", "content": "x"}]), "messages"),
    ((MESSAGE,), said([{"type": "image", "source": {}}]), "messages"),
    ((MESSAGE,), {"messages": []}, "messages"),
    ((MESSAGE,), {"thinking": {"type": "between_tools"}}, "thinking.type"),
    ((MESSAGE,), {"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ((MESSAGE,), {"max_tokens": 0}, "max_tokens"),
    ((MESSAGE,), {"max_tokens": 10**6}, "messages"),
]


CASES = [
    pytest.param(path, fields, param, id=f"{path} {str(fields)[:60]}")
    for paths, fields, param in REFUSED
    for path in paths
]


@pytest.mark.parametrize(("path", "fields", "param"), CASES)
def test_it_is_refused_by_its_name(
    http: httpx.Client, stack: Stack, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = http.post(path, json={**ASKED[path], **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    kind = "invalid_request_error" if path == MESSAGE else "BadRequestError"
    assert (error["type"], error["param"]) == (kind, param)
    assert {"message", "type", "param", "code"} == set(error)
    assert len(reply.content) < 16_000
    assert stack.script.requests == []
