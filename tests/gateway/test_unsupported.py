"""No field that OpenAI's and Anthropic's packages can send is dropped in silence: it is honoured, refused by its name,
a hint, or listed as ignored on the API's page."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic.types as claude
import httpx
import pytest
import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from gateway_stack import ASKED, CHAT, COMPLETION, MESSAGE, RESPONSE, Stack
from openai.types import chat as openai_chat
from openai.types import completion_create_params
from openai.types import responses as openai_responses
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params, response_input_item_param
from pydantic import BaseModel

from gateway.rest import schemas
from gateway.rest.hints import HINTS
from gateway.rest.messages import schemas as messages
from gateway.rest.responses import schemas as responses
from gateway.rest.unsupported import UNSUPPORTED

API = Path(__file__).parents[2] / "docs" / "api.md"
KINDS: dict[str, type[schemas.Body]] = {
    CHAT: schemas.ChatBody,
    COMPLETION: schemas.CompletionBody,
    RESPONSE: responses.ResponsesBody,
    MESSAGE: messages.MessagesBody,
}
# what a package sends, and what reads it; of messages and items the kinds that are served
SENT: list[tuple[str, Any, type[schemas.Body]]] = [
    (CHAT, chat_create_params.CompletionCreateParamsNonStreaming, schemas.ChatBody),
    ("message", openai_chat.ChatCompletionSystemMessageParam, schemas.MessageBody),
    ("message", openai_chat.ChatCompletionDeveloperMessageParam, schemas.MessageBody),
    ("message", openai_chat.ChatCompletionUserMessageParam, schemas.MessageBody),
    ("message", openai_chat.ChatCompletionAssistantMessageParam, schemas.MessageBody),
    ("message", openai_chat.ChatCompletionToolMessageParam, schemas.MessageBody),
    ("part", openai_chat.ChatCompletionContentPartTextParam, schemas.TextPart),
    (COMPLETION, completion_create_params.CompletionCreateParamsNonStreaming, schemas.CompletionBody),
    (RESPONSE, response_create_params.ResponseCreateParamsNonStreaming, responses.ResponsesBody),
    ("item", openai_responses.EasyInputMessageParam, responses.InputItem),
    ("item", response_input_item_param.Message, responses.InputItem),
    ("item", openai_responses.ResponseOutputMessageParam, responses.InputItem),
    ("item", openai_responses.ResponseFunctionToolCallParam, responses.InputItem),
    ("item", response_input_item_param.FunctionCallOutput, responses.InputItem),
    ("part", openai_responses.ResponseInputTextParam, responses.Part),
    ("part", openai_responses.ResponseOutputTextParam, responses.Part),
    (MESSAGE, message_create_params.MessageCreateParamsNonStreaming, messages.MessagesBody),
    ("count", message_count_tokens_params.MessageCountTokensParams, messages.CountBody),
    ("block", claude.TextBlockParam, messages.Block),
    ("block", claude.ThinkingBlockParam, messages.Block),
    ("block", claude.ToolUseBlockParam, messages.Block),
    ("block", claude.ToolResultBlockParam, messages.Block),
]


def ignored() -> set[str]:
    """Return the fields that the page lists as ignored."""
    section = API.read_text().split("### Fields that are ignored")[1].split("\n### ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`([a-z_.]+)`", " ".join(rows)))


def within(hint: Any, is_wanted: Any) -> Iterator[Any]:
    """Yield the wanted types of an annotation, at any depth."""
    if is_wanted(hint):
        yield hint
    elif typing.get_origin(hint) is not typing.Literal:
        for each in typing.get_args(hint):
            yield from within(each, is_wanted)


def is_body(hint: Any) -> bool:
    return isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and issubclass(hint, BaseModel)


def words(hint: Any) -> set[Any]:
    """That a field may be."""
    return {
        word
        for each in within(hint, lambda one: typing.get_origin(one) is typing.Literal)
        for word in each.__args__
    }


def dropped(path: str, sent: Any, kind: type[BaseModel]) -> Iterator[str]:
    """The fields of what is sent, those of objects in it too, of which nothing is said."""
    fields = {field.alias or name: field for name, field in kind.model_fields.items()}
    hints = {hint.path for hint in HINTS if kind in hint.apis}
    for name, hint in typing_extensions.get_type_hints(sent).items():
        place = f"{path}.{name}"
        if any(place.endswith(f".{each}") for each in ignored()) or name in {
            *UNSUPPORTED.get(kind, ()),
            *hints,
        }:
            continue
        if name not in fields:
            yield place
            continue
        bodies = list(within(fields[name].annotation, is_body))
        # messages, items and blocks are of many types: see SENT
        inner = (
            []
            if name in ("messages", "input", "content", "system", "output")
            else within(hint, typing_extensions.is_typeddict)
        )
        for each in inner:
            mine = words(typing_extensions.get_type_hints(each).get("type"))
            for body in bodies:
                theirs = words(body.model_fields["type"].annotation) if "type" in body.model_fields else set()
                # what is of another type is refused
                if not mine or not theirs or mine & theirs:
                    yield from dropped(place, each, body)


@pytest.mark.parametrize(
    ("path", "sent", "kind"), SENT, ids=[f"{path} {sent.__name__}" for path, sent, _ in SENT]
)
def test_no_field_is_dropped_in_silence(path: str, sent: Any, kind: type[schemas.Body]) -> None:
    assert sorted(dropped(path, sent, kind)) == []


def told(http: httpx.Client, path: str, fields: dict[str, Any]) -> tuple[int, str | None]:
    reply = http.post(path, json={**ASKED[path], **fields})
    return reply.status_code, None if reply.is_success else reply.json()["error"]["param"]


@pytest.mark.parametrize("path", ASKED)
def test_what_is_not_done_is_refused_by_its_name_unless_it_changes_nothing(
    http: httpx.Client, stack: Stack, path: str
) -> None:
    hints = {hint.path for hint in HINTS if KINDS[path] in hint.apis}
    refused = {name: value for name, value in UNSUPPORTED[KINDS[path]].items() if name not in hints}
    assert {name: told(http, path, {name: {"a": 5}}) for name in refused} == {
        name: (400, name) for name in refused
    }
    assert stack.script.requests == []
    stack.say("the fox")
    assert told(http, path, dict(refused)) == (200, None)
    assert told(http, path, dict.fromkeys(refused)) == (200, None)
    assert told(http, path, dict.fromkeys(refused, False)) == (200, None)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSE, {"reasoning": {"summary": "auto", "effort": "medium", "context": "auto", "mode": "standard"}}),
        (RESPONSE, {"text": {"verbosity": "medium"}, "stream_options": {"include_obfuscation": True}}),
        (RESPONSE, {"tools": [{"type": "function", "name": "f", "async": False, "allowed_callers": ["direct"]}],
                    "tool_choice": "none"}),
        (CHAT, {"modalities": ["text"], "verbosity": "medium", "function_call": "none", "metadata": {"a": "b"}}),
        (CHAT, {"store": True, "user": "x", "prediction": {"type": "content", "content": "a"}, "any name": 5}),
        (MESSAGE, {"thinking": {"type": "adaptive", "display": None}, "metadata": {"user_id": "x"}}),
        (MESSAGE, {"output_config": {"effort": "high"}}),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_taken(
    http: httpx.Client, stack: Stack, path: str, fields: dict[str, Any]
) -> None:
    stack.say("the fox")
    assert told(http, path, fields) == (200, None)


def test_vllms_name_for_an_assistants_reasoning_is_taken(http: httpx.Client, stack: Stack) -> None:
    for name in ("reasoning", "reasoning_content"):
        body = schemas.ChatBody.model_validate(
            {"messages": [{"role": "assistant", "content": "a", name: "because"}]}
        )
        assert (body.messages[0].reasoning_content or body.messages[0].reasoning) == "because"
