"""How families of models write calls of tools in their answers."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from carrel.process.request_limits import JSON_WHITE_SPACE
from gateway.exchange import Tool, Tools

HERMES = "hermes"
ANY_OBJECT = {"type": "object"}


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
        Raises ValueError for an `answer` that is no schema."""
        rules = [*self._rules(tools, opener_id), *self._starts(tools, opener_id, answer, is_free)]
        return "\n".join(
            [*rules, *(f"call_{at}: {self._one(tool, is_free)}" for at, tool in enumerate(tools.callable))]
        )

    def _rules(self, tools: Tools, opener_id: int | None) -> list[str]:
        opener = _quoted(self.opener) if opener_id is None else f"<[{opener_id}]>"
        one = " | ".join(f"call_{at}" for at in range(len(tools.callable)))
        call = f"call: ({one}) {_quoted(self.closer)}"
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
            return ["start: calls | answer", f"answer: %json {_schema(schema)}"]
        if not is_free:
            return ["start: calls"]
        if not self.opener:
            return ["start: calls | TEXT", r"TEXT: /(\s*[^\s{](.|\n)*)?/"]
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

    def _one(self, tool: Tool, is_free: bool) -> str:
        edge = "\n" if self.closer else ""
        head = f'{edge}{{"name": {json.dumps(tool.name)}, "{self.arguments}": '
        schema = tool.parameters if tool.strict or not is_free else ANY_OBJECT
        return f"{_quoted(head)} %json {_schema(schema)} {_quoted('}' + edge)}"


def _quoted(text: str) -> str:
    """A string of Lark's is written as one of JSON; an empty one is left out."""
    return json.dumps(text) if text else ""


def _schema(schema: Mapping[str, object] | bool) -> str:
    options = {"x-guidance": {"whitespace_pattern": JSON_WHITE_SPACE}}
    return json.dumps(options if isinstance(schema, bool) else {**options, **schema})


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
        between="; ", arguments="parameters", hints=("<|python_tag|>", '"parameters"', "Environment: ipython")
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
    """Whether a chat template writes tools itself."""
    return _TOOLS.search(template) is not None
