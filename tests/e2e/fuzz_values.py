"""Valid and invalid values of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"enum": ["x", 1]},
    True,
)
REGEXES = ("[a-z]{1,3}", "(yes|no)", "(?=x)y", "(a*)*b", "(", "[[:alpha:]]", "x{1,100000}", "\\d+(\\.\\d+)?")
# What a field may well be, by its own name or behind that of the object it is in.
SAMPLES: Mapping[str, tuple[Any, ...]] = {
    "model": ("carrel-nano",),
    "prompt": ("The amber fox", [5, 6, 7], ["one", "two"], [[5, 6], [7]]),
    "input": ("The amber fox", [{"role": "user", "content": "The amber fox"}]),
    "InputItem.type": ("message", "message", "function_call", "function_call_output"),
    "Part.type": ("input_text", "output_text"),
    "Block.type": ("text", "text", "tool_use", "tool_result", "thinking"),
    "Block.input": ({"a": 1},),
    "TextPart.type": ("text",),
    "type": ("text", "json_object", "json_schema", "function"),
    "Turn.role": ("user", "assistant"),
    "ToolChoiceBody.type": ("auto", "any", "none"),
    "TextFormat.type": ("text", "json_object"),
    "ResponseFormat.type": ("text", "json_object"),
    "FunctionTool.type": ("function",),
    "OfferedTool.type": ("function", "function", "namespace"),
    "role": ("user", "assistant", "system", "tool", "developer"),
    "content": ("What is the secret number?", "你好 🦊", "", "a\n" * 50),
    "system": ("Be short.",),
    "name": ("give", "look_up"),
    "arguments": ('{"a": 1}', "{}", "[]", "{"),
    **dict.fromkeys(("json", "schema", "guided_json", "parameters", "input_schema"), SCHEMAS),
    **dict.fromkeys(("regex", "guided_regex"), REGEXES),
    **dict.fromkeys(("grammar", "guided_grammar"), ('start: "a" | "b"', 'root ::= "yes" | "no"', "start: start")),
    **dict.fromkeys(("choice", "guided_choice"), (["yes", "no"], ["x"] * 3, [])),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), (1, 2, 3, 4)),
    **dict.fromkeys(("id", "tool_call_id", "call_id", "tool_use_id"), ("call_1", "call_2")),
    **dict.fromkeys(("session_id", "cache_salt"), ("s1", "s2", "s3")),
    "min_tokens": (0, 1, 2),
    "n": (1, 1, 2),
    "stop": (".", ["a", "fox"]),
    "stop_token_ids": ([5],),
    "tokens": ([5, 6, 7], []),
    "logit_bias": ({"5": 3.5},),
    "timeout_seconds": (30, "30", 60.0),
    "truncate_prompt_tokens": (1, 5),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
    "policy": ("full", "bitkeys", "pqcache", "snapkv", "streaming_llm", "auto"),
    "options": ({}, {"num_sink": 4}, {"recent_ratio": 0.2}),
    "model_id": ("carrel-nano",),
    "response_id": ("resp_1",),
}  # fmt: skip
# how often a value is another than it should be, of requests of each temper
WRONG = {"good": 0.0, "near": 0.06, "hostile": 0.35, "broken": 0.0}
HOSTILE = (
    None, True, "", "\x00", "\ud800", "\udfff\ud800", "A" * 5000, "‮🦊" * 40, "../../etc/passwd", "file:///etc/passwd",
    "{{ 7 * 7 }}", "%s%n${x}", "'; --", -1, 0, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e-320,
    1e308, float("nan"), float("inf"), float("-inf"), "NaN", "1", [], {}, [[]], [None], [{}] * 50, ["x"] * 3000,
    {"": ""}, {"__proto__": {"a": 1}}, {"\ud800": 1}, {"a": {"a": {"a": {"a": {}}}}}, [1.5, "x", None, [], {}],
)  # fmt: skip
HEADERS = (
    ("Content-Type", "text/plain"), ("Content-Type", "application/json; charset=utf-16"), ("Content-Type", ""),
    ("Content-Type", "multipart/form-data; boundary=x"), ("Content-Encoding", "gzip"), ("Accept", "image/png"),
    ("Accept-Encoding", "gzip;q=nan"), ("X-Request-Id", "x" * 300), ("X-Request-Id", "a\tb"), ("X-Request-Id", "\xff"),
    ("Authorization", "Bearer"), ("Authorization", "Basic \xff"), ("x-api-key", "\x01"),
    ("Origin", "http://evil.example"), ("Origin", "null"), ("Host", "evil.example"), ("Host", "["),
    ("Cookie", "a=b; " * 2000), ("X-Forwarded-For", "::1, x"), ("traceparent", "ff-xyz"),
    ("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"), ("tracestate", "=" * 600),
    ("Content-Length", "-1"), ("Content-Length", "1e3"), ("Content-Length", "9" * 30), ("Content-Length", "3"),
    ("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "gzip"), ("Expect", "100-continue"), ("Range", "bytes=9-"),
    ("Upgrade", "websocket"), ("Connection", "Upgrade, HTTP2-Settings"), ("X\x00", "1"), ("", "x"),
    ("anthropic-version", "1"), ("Sec-Fetch-Site", "cross-site"), ("Access-Control-Request-Method", "POST"),
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "FOO", "get")
OTHER_TARGETS = (
    "/",
    "/docs",
    "/openapi.json",
    "/v1",
    "/v1/models/",
    "//v1/models",
    "/v1/models/../../x",
    "*",
    "/%00",
    "/" + "a" * 9000,
)
QUERIES = ("?stream=true", "?%ff=%00", "?limit=-1&after=\x7f", "?a=" + "b" * 3000)
