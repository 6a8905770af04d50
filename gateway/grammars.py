"""Constraints of an answer's form in any protocol, to the worker's grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.errors import InvalidRequest
from gpu_worker.v1 import gpu_worker_pb2 as pb

MAX_CHOICES = 1024
# an object, a truth value, or the text of one
JsonSchema = dict[str, Any] | bool | str
# of a model that does not say what its JSON is
ANY_OBJECT: JsonSchema = {"type": "object"}


def json_grammar(schema: JsonSchema, param: str) -> pb.Grammar:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return pb.Grammar(json_schema=text, param=param)


def format_grammars(kind: str, schema: JsonSchema | None, param: str, place: str) -> list[pb.Grammar]:
    """Return the grammar of a format, none for text. Raises InvalidRequest.

    kind: text, json_object or json_schema. place: the field of `param` that holds the schema.
    """
    match kind:
        case "text":
            return []
        case "json_object":
            return [json_grammar(ANY_OBJECT, param)]
        case "json_schema":
            if schema is None:
                raise InvalidRequest(f"{param} of type json_schema needs its field {place}.", param)
            return [json_grammar(schema, param)]
    raise InvalidRequest(f"{param} has no type {kind[:50]!r}: give text, json_object or json_schema.", param)


def one_of(texts: Sequence[str], param: str) -> pb.Grammar:
    """Raises InvalidRequest."""
    if not 0 < len(texts) <= MAX_CHOICES or not all(texts):
        raise InvalidRequest(f"{param} must have 1 to {MAX_CHOICES} texts, none of them empty.", param)
    # a string of Lark's is written as one of JSON
    return pb.Grammar(ebnf="start: " + " | ".join(json.dumps(text) for text in texts), param=param)


def grammars_of(
    prefix: str,
    schema: JsonSchema | None,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None,
) -> list[pb.Grammar]:
    """Return a grammar for each field that is set of `json`, `regex`, `choice` and `grammar` behind this prefix. Raises
    InvalidRequest."""
    found = [] if schema is None else [json_grammar(schema, f"{prefix}json")]
    if regex is not None:
        found.append(pb.Grammar(regex=regex, param=f"{prefix}regex"))
    if choice is not None:
        found.append(one_of(choice, f"{prefix}choice"))
    if grammar is not None:
        found.append(pb.Grammar(ebnf=grammar, param=f"{prefix}grammar"))
    return found


def structured(
    schema: JsonSchema | None,
    is_object: bool,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None,
) -> list[pb.Grammar]:
    """Return the grammars of `structured_outputs`. Raises InvalidRequest where it is empty."""
    param = "structured_outputs"
    found = grammars_of(f"{param}.", schema, regex, choice, grammar)
    if is_object:
        found.append(json_grammar(ANY_OBJECT, f"{param}.json_object"))
    if not found:
        raise InvalidRequest(
            f"{param} is empty: give one of json, json_object, regex, choice, grammar.", param
        )
    return found


def only_one(found: Sequence[pb.Grammar]) -> pb.Grammar | None:
    """None where the answer may be anything. Raises InvalidRequest for two; whether a grammar can be used is known to
    the worker."""
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0].param} and {found[1].param} both say what the answer must be: give one.",
            found[1].param,
        )
    return found[0] if found else None
