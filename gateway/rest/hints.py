"""Hints of clients: fields that ask for nothing that a correct answer would show.

They are taken out of a body before it is checked, and the answer names them in a header. With --strict-fields they stay
in the body, which is then checked as it was sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from gateway.rest.fields import changes_nothing
from gateway.rest.messages.schemas import CountBody, MessagesBody
from gateway.rest.responses.schemas import ResponsesBody
from gateway.rest.schemas import Body, ChatBody, CompletionBody
from gateway.tool_calls.checks import MAX_TOOLS

HEADER = "x-carrel-ignored"
# stands for each entry of a list
EACH = "*"
IGNORED = f"a hint: it is ignored, and the answer names it in the header {HEADER}"
# of a list that is searched; a longer one is refused, and costs no more time than that
MAX_ENTRIES = 2 * MAX_TOOLS
# ends the type of a tool that has editions
_EDITION = re.compile(r"_(\d{8}|\d{4}_\d{2}_\d{2})$")

CHAT: tuple[type[Body], ...] = (ChatBody,)
OPENAI: tuple[type[Body], ...] = (ChatBody, CompletionBody)
RESPONSES: tuple[type[Body], ...] = (ResponsesBody,)
MESSAGES: tuple[type[Body], ...] = (MessagesBody, CountBody)
EVERY = (*OPENAI, *RESPONSES, *MESSAGES)
# a response has these, or answers with them
BUT_RESPONSES = (*OPENAI, *MESSAGES)


@dataclass(frozen=True, slots=True)
class Hint:
    """A field that is ignored.

    path: names from the body to the field, with EACH for the entries of a list.
    apis: the bodies that may have it.
    words: the only values that are hints, or the types of such objects; empty: any value.
    honoured_by: the variable by which a chat template honours the field; empty: none does.
    """

    path: str
    apis: tuple[type[Body], ...] = EVERY
    words: tuple[str, ...] = ()
    honoured_by: str = ""


HINTS = (
    # the caller
    Hint("client_metadata"),
    Hint("metadata", BUT_RESPONSES),
    Hint("user", BUT_RESPONSES),
    Hint("safety_identifier"),
    # speed and caching: every prompt is cached
    Hint("service_tier"),
    Hint("speed"),
    Hint("prediction", CHAT),
    Hint("prompt_cache_retention"),
    Hint("prompt_cache_options", BUT_RESPONSES),
    Hint("store", CHAT),
    # a prompt that is too long is refused, never cut
    Hint("truncation", words=("auto",)),
    Hint("context_management"),
    # how much the model thinks and says
    Hint("verbosity"),
    Hint("text.verbosity", RESPONSES),
    Hint("reasoning_effort", honoured_by="reasoning_effort"),
    Hint("output_config.effort", MESSAGES),
    Hint("thinking_token_budget"),
    Hint("thinking", MESSAGES, words=("enabled", "disabled"), honoured_by="enable_thinking"),
    Hint("thinking.budget_tokens", MESSAGES),
    Hint("thinking.display", MESSAGES),
    Hint("reasoning", BUT_RESPONSES),
    Hint("reasoning.effort", RESPONSES),
    Hint("reasoning.summary", RESPONSES),
    Hint("reasoning.generate_summary", RESPONSES),
    Hint(
        "include.*",
        RESPONSES,
        words=(
            "reasoning.encrypted_content",
            "web_search_call.results",
            "web_search_call.action.sources",
            "file_search_call.results",
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
        ),
    ),
    # tools that a provider runs, or that are no functions: the prompt has the others
    Hint(
        "tools.*",
        words=(
            "web_search",
            "web_search_preview",
            "web_fetch",
            "file_search",
            "code_interpreter",
            "code_execution",
            "image_generation",
            "computer",
            "computer_use_preview",
            "tool_search",
            "tool_search_tool_regex",
            "tool_search_tool_bm25",
            "custom",
        ),
    ),
    Hint("tools.*.tools.*", RESPONSES, words=("custom",)),
    # all tools are in the prompt from the beginning
    Hint("tools.*.defer_loading"),
    Hint("tools.*.function.defer_loading", CHAT),
    Hint("tools.*.tools.*.defer_loading", RESPONSES),
)
KINDS = frozenset(EVERY)


def take_hints(decoded: Any, kind: type[Any], template_names: Set[str]) -> tuple[str, ...]:
    """Take the hints out of the decoded body of this kind, and return their names, which are the table's own.

    template_names: the variables that the model's chat template reads.
    """
    if kind not in KINDS or not isinstance(decoded, dict):
        return ()
    found = (
        name
        for hint in HINTS
        if kind in hint.apis and hint.honoured_by not in template_names
        for name in _take(decoded, hint.path.split("."), hint.words, _name(hint.path))
    )
    return tuple(dict.fromkeys(found))


def _name(path: str) -> str:
    return path.replace(f".{EACH}", "")


def _take(at: Any, path: Sequence[str], words: tuple[str, ...], name: str) -> Iterator[str]:
    """Take the field, which is at this path from here. Yields its name, of a list's entries with their words."""
    step, *rest = path
    match at:
        case list() if len(at) > MAX_ENTRIES:
            return
        case list() if step == EACH and rest:
            for each in at:
                yield from _take(each, rest, words, name)
        case list() if step == EACH:
            yield from (f"{name}.{word}" for each in at if (word := _word(each)) in words)
            at[:] = [each for each in at if _word(each) not in words]
        case dict() if step in at and rest:
            yield from _take(at[step], rest, words, name)
        case dict() if step in at and not changes_nothing(at[step]):
            if not words or _word(at[step]) in words:
                del at[step]
                yield name


def _word(value: Any) -> str:
    """The text, or an object's type without its edition; empty: neither."""
    match value:
        case str(word) | {"type": str(word)}:
            return _EDITION.sub("", word)
    return ""


def describe_hints(document: dict[str, Any]) -> None:
    """Add the hints to the OpenAPI document of a server that takes them."""
    schemas = document["components"]["schemas"]
    for hint in HINTS:
        for kind in hint.apis:
            _describe(schemas, schemas[kind.__name__], hint.path.split("."))
    bodies = {f"#/components/schemas/{kind.__name__}" for kind in KINDS}
    header = {"description": "hints that were ignored, by their names", "schema": {"type": "string"}}
    for operations in document["paths"].values():
        body = operations.get("post", {}).get("requestBody")
        if body and body["content"]["application/json"]["schema"].get("$ref") in bodies:
            operations["post"]["responses"]["200"]["headers"] = {HEADER: header}


def _describe(schemas: dict[str, Any], schema: dict[str, Any], path: Sequence[str]) -> None:
    name, *rest = [step for step in path if step != EACH]
    properties = schema["properties"]
    if not rest:
        properties.setdefault(name, {}).setdefault("description", IGNORED)
    elif (found := _reference(properties[name])) is not None:
        _describe(schemas, schemas[found.rpartition("/")[2]], rest)


def _reference(schema: Any) -> str | None:
    """The first reference within a property's schema."""
    match schema:
        case {"$ref": str(found)}:
            return found
        case dict():
            parts = [*schema.get("anyOf", ()), schema.get("items")]
            return next(filter(None, map(_reference, parts)), None)
    return None
