"""Test that answers match the documented types, and that the page of the API needs no other server."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from gateway_stack import Stack
from pydantic import BaseModel
from waiting import PATIENCE

from gateway.rest import answers
from gateway.rest.messages.schemas import CountAnswer, MessageAnswer
from gateway.rest.responses.schemas import ResponseAnswer

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"prompt": "the", "echo": True, "return_token_ids": True}
MESSAGE = {**CHAT, "max_tokens": 9}

ANSWERS = [
    ("POST", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}, answers.ChatAnswer),
    ("POST", "/v1/completions", {**COMPLETION, "logprobs": 1}, answers.CompletionAnswer),
    ("GET", "/v1/models", None, answers.ModelListAnswer),
    ("GET", "/v1/models/tiny", None, answers.ModelAnswer),
    ("POST", "/tokenize", {"prompt": "the"}, answers.TokenizedAnswer),
    ("POST", "/detokenize", {"tokens": [5]}, answers.DetokenizedAnswer),
    ("GET", "/health", None, answers.StatusAnswer),
    ("GET", "/ready", None, answers.StatusAnswer),
    ("GET", "/version", None, answers.VersionAnswer),
    ("GET", "/server_info", None, answers.ServerInfoAnswer),
    ("GET", "/load", None, answers.LoadAnswer),
    ("POST", "/v1/messages", MESSAGE, MessageAnswer),
    ("POST", "/v1/messages/count_tokens", CHAT, CountAnswer),
    ("POST", "/v1/responses", {"input": "hello"}, ResponseAnswer),
    ("POST", "/v1/embeddings", {"input": "hello"}, answers.ErrorAnswer),
    ("POST", "/v1/completions", {}, answers.ErrorAnswer),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "kind"),
    ANSWERS,
    ids=[f"{path} {kind.__name__}" for _, path, _, kind in ANSWERS],
)
def test_an_answer_is_as_its_type_says(
    http: httpx.Client,
    stack: Stack,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    kind: type[BaseModel],
) -> None:
    stack.say("the fox")
    reply = http.request(method, path, json=body)
    kind.model_validate_json(reply.content)
    document = http.get("/openapi.json").json()
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    check(reply.json(), schema, document, kind.__name__)
    described = document["paths"][path.replace("tiny", "{model_id}")][method.lower()]["responses"]
    place = described["200" if reply.status_code == 200 else "4XX"]
    assert place["content"]["application/json"]["schema"] == schema


STREAMED = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]


@pytest.mark.parametrize("fail_at", [None, 2])
@pytest.mark.parametrize("path", STREAMED)
def test_each_event_of_a_stream_is_as_one_of_its_types_says(
    http: httpx.Client, stack: Stack, path: str, fail_at: int | None
) -> None:
    stack.say("<think>so</think>the fox", progress=[(2, 2)], fail_at=fail_at)
    asked = next(body for _, each, body, _ in ANSWERS if each == path)
    options = {"include_progress": True, "include_usage": True, "continuous_usage_stats": True}
    more = {} if path in ("/v1/messages", "/v1/responses") else {"stream_options": options}
    stream = http.post(path, json={**asked, "stream": True, **more})
    events = [json.loads(data) for data in re.findall(r"^data: (\{.*)$", stream.text, re.MULTILINE)]
    assert len(events) > 4
    assert ("error" in (events[-1].get("type"), *events[-1])) == (fail_at is not None)
    document = http.get("/openapi.json").json()
    answers_of = document["paths"][path]["post"]["responses"]["200"]["content"]
    kinds = [each["$ref"].rpartition("/")[2] for each in answers_of["text/event-stream"]["schema"]["anyOf"]]
    for event in events:
        fitting = [name for name in kinds if is_of(event, document["components"]["schemas"][name])]
        assert len(fitting) == 1, (event, fitting)
        check(event, {"$ref": f"#/components/schemas/{fitting[0]}"}, document, fitting[0])


def is_of(event: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Return whether an event has the required fields of a type, and its `type` or `object` if it has one."""
    if not set(schema.get("required", ())) <= set(event) <= set(schema["properties"]):
        return False
    tags = [schema["properties"][name] for name in ("type", "object") if name in schema["properties"]]
    told = event.get("type", event.get("object"))
    return all(told in tag.get("enum", [tag.get("const", told)]) for tag in tags)


def check(value: Any, schema: dict[str, Any], document: dict[str, Any], where: str) -> None:
    """Nothing is in an answer that the document does not name."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema and isinstance(value, dict | list):
        of_kind = "object" if isinstance(value, dict) else "array"
        schema = next(each for each in schema["anyOf"] if "$ref" in each or each.get("type") == of_kind)
        return check(value, schema, document, where)
    if isinstance(value, dict) and "properties" in schema:
        assert set(value) <= set(schema["properties"]), where
        for name, each in value.items():
            check(each, schema["properties"][name], document, f"{where}.{name}")
    if isinstance(value, list):
        for each in value:
            check(each, schema["items"], document, where)
    return None


def test_the_document_tells_the_bodies_and_how_to_send_a_key(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    paths, schemas = document["paths"], document["components"]["schemas"]
    chat = paths["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatBody")
    assert {"type": "number", "minimum": 0, "maximum": 2} in schemas["ChatBody"]["properties"]["temperature"][
        "anyOf"
    ]
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    budget = schemas["CarrelBody"]["properties"]["budget"]["anyOf"][0]["anyOf"]
    assert budget == [
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "integer", "minimum": 2},
    ]
    assert document["components"]["securitySchemes"]["bearer"] == {"type": "http", "scheme": "bearer"}
    with_key = [{"bearer": []}, {"x-api-key": []}]
    asked = {path: each.get("security") for path, item in paths.items() for each in item.values()}
    assert [path for path, keys in asked.items() if keys is None] == ["/health", "/ready"]
    assert all(keys in (None, with_key) for keys in asked.values())
    names = [each["operationId"] for item in paths.values() for each in item.values()]
    assert len(set(names)) == len(names)


def test_the_page_loads_nothing_from_elsewhere_and_needs_no_key(locked_stack: Stack) -> None:
    page = httpx.get(f"{locked_stack.url}/docs", timeout=PATIENCE)
    assert page.status_code == 200
    assert not re.findall(r"(?:src|href)=\"(?!openapi\.json\")", page.text)
    assert "://" not in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert httpx.get(f"{locked_stack.url}/openapi.json", timeout=PATIENCE).status_code == 401
