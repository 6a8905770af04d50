"""How families of models write calls of tools in their answers."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.exchange import Tool, Tools
from gateway.tool_calls.schemas import calls_schema, check_takes_object, json_rule

HERMES = "hermes"
ANY_OBJECT = {"type": "object"}
# Llama's, which may stand before an answer's first brace
PYTHON_TAG = "<|python_tag|>"
_TAGGED = re.escape(PYTHON_TAG)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _nine_characters() -> str:
    """Mistral's templates refuse any other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`opener`: what calls begin with; empty: the answer's first brace. `closer`: what ends each; empty: nothing.
    `list_begin`, `between`, `list_end`: around and between the calls of an answer. `arguments`: the key of a call's
    arguments. `is_special`: the opener is a special token. `hints`: a template with one of these is of the family."""

    opener: str = ""
    closer: str = ""
    list_begin: str = ""
    between: str = "\n"
    list_end: str = ""
    arguments: str = "arguments"
    is_special: bool = False
    hints: tuple[str, ...] = ()
    new_id: Callable[[], str] = _call_id

    def grammar(self, tools: Tools, answer: str | None, opener_id: int | None, is_free: bool = False) -> str:
        """In Lark's format: calls of these tools. With `answer`, a JSON schema: or JSON of it. `is_free`: or any text,
        in which what begins a call is one. opener_id: the special token of the opener, where the vocabulary has one.
        Raises InvalidRequest for a tool whose arguments could be no object, and ValueError for an `answer` that is not
        a schema.

        A call is JSON by its schema, as an answer is, so that both are read in the same steps: a text of the grammar
        that is longer than these, such as a call's head, would be the only one left once it has begun.
        """
        held = {tool.name: _arguments(tool, is_free) for tool in tools.callable}
        call = f"call_json: {json_rule(calls_schema(held, self.arguments))}"
        return "\n".join(
            [*self._rules(tools, opener_id), *self._starts(tools, opener_id, answer, is_free), call]
        )

    def _rules(self, tools: Tools, opener_id: int | None) -> list[str]:
        opener = _quoted(self.opener) if opener_id is None else f"<[{opener_id}]>"
        edge = _quoted("\n") if self.closer else ""
        call = f"call: {edge} call_json {edge} {_quoted(self.closer)}"
        if self.closer:
            more = f"({_quoted(self.between)} opener call)*" if tools.is_parallel else ""
            return [f"opener: {opener}", call, f"calls: opener call {more}"]
        more = f"({_quoted(self.between)} call)*" if tools.is_parallel else ""
        listed = f"listed: {_quoted(self.list_begin)} call {more} {_quoted(self.list_end)}"
        return [call, listed, f"calls: {opener} listed"]

    def _starts(self, tools: Tools, opener_id: int | None, answer: str | None, is_free: bool) -> list[str]:
        if answer is not None:
            schema = json.loads(answer)
            if not isinstance(schema, dict | bool):
                raise ValueError("it is neither an object nor a truth value")
            return ["start: calls | answer", f"answer: {json_rule(schema)}"]
        if not is_free:
            return ["start: calls"]
        if not self.opener:
            return ["start: calls | TEXT", rf"TEXT: /(\s*[^\s{{](.|\n)*)?/ & ~/\s*{_TAGGED}\s*\{{(.|\n)*/"]
        text, many = r"TEXT: /(.|\n)*/", "*" if tools.is_parallel and self.closer else "?"
        part = "call" if self.closer else "listed"
        if opener_id is not None:
            return [f"start: TEXT (<[{opener_id}]> {part} TEXT){many}", text]
        return [f"start: (begun {part}){many} TEXT", f"begun[lazy]: TEXT {_quoted(self.opener)}", text]

    def written(self, name: str, arguments: object) -> str:
        """A call, as it stands in an answer."""
        call = json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
        edge = "\n" if self.closer else ""
        return f"{self.opener}{edge}{call}{edge}{self.closer}"


def _arguments(tool: Tool, is_free: bool) -> Mapping[str, Any]:
    """Return the schema that a call's arguments are held to. Raises InvalidRequest."""
    if is_free and not tool.strict:
        return ANY_OBJECT
    check_takes_object(tool)
    return tool.parameters


def _quoted(text: str) -> str:
    """A string of Lark's is written as one of JSON; an empty one is left out."""
    return json.dumps(text) if text else ""


FAMILIES: Mapping[str, CallFormat] = {
    HERMES: CallFormat("<tool_call>", "</tool_call>", hints=("<tool_call>",)),
    "mistral": CallFormat(
        "[TOOL_CALLS]",
        list_begin="[",
        between=", ",
        list_end="]",
        is_special=True,
        hints=("[TOOL_CALLS]",),
        new_id=_nine_characters,
    ),
    "llama3_json": CallFormat(
        between="; ", arguments="parameters", hints=(PYTHON_TAG, '"parameters"', "Environment: ipython")
    ),
}
_TOOLS = re.compile(r"\btools\b")


def family_of(template: str | None) -> str:
    """The family by a chat template; one that says nothing of tools gets them as Hermes has them."""
    if template is not None and takes_tools(template):
        found = (name for name, each in FAMILIES.items() if any(hint in template for hint in each.hints))
        return next(found, HERMES)
    return HERMES


def takes_tools(template: str) -> bool:
    """Return whether a chat template writes tools itself."""
    return _TOOLS.search(template) is not None
