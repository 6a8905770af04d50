"""What an answer must be: the fields that say so, as OpenAI and vLLM spell them, to the worker's grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gateway.errors import InvalidRequest
from gateway.rest.schemas import GenerationBody, JsonSchema, ResponseFormat, StructuredOutputs
from gpu_worker.v1 import gpu_worker_pb2 as pb

MAX_CHOICES = 1024
# of a model that does not say what its JSON is
ANY_OBJECT = {"type": "object"}


def read_grammar(body: GenerationBody) -> pb.Grammar | None:
    """None where the answer may be anything. Raises InvalidRequest for a field that says nothing, and for two; whether
    a grammar can be used is known to the worker."""
    found = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
        *_of_fields("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar),
    ]
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0].param} and {found[1].param} both say what the answer must be: give one.",
            found[1].param,
        )
    return found[0] if found else None


def json_grammar(schema: JsonSchema, param: str) -> pb.Grammar:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return pb.Grammar(json_schema=text, param=param)


def _of_response_format(asked: ResponseFormat | None) -> list[pb.Grammar]:
    param = "response_format"
    match asked:
        case None | ResponseFormat(type="text"):
            return []
        case ResponseFormat(type="json_object"):
            return [json_grammar(ANY_OBJECT, param)]
        case ResponseFormat(type="json_schema", json_schema=named):
            if named is None or named.json_schema is None:
                raise InvalidRequest(
                    "response_format of type json_schema needs json_schema, with the schema as its field schema.",
                    param,
                )
            return [json_grammar(named.json_schema, param)]
        case _:
            raise InvalidRequest(
                f"response_format has no type {asked.type[:50]!r}: give text, json_object or json_schema.",
                param,
            )


def _of_structured_outputs(asked: StructuredOutputs | None) -> list[pb.Grammar]:
    if asked is None:
        return []
    param = "structured_outputs"
    if unknown := next((name for name, value in (asked.model_extra or {}).items() if value), None):
        raise InvalidRequest(f"{param}.{unknown[:50]} is not supported: leave it out.", param)
    found = _of_fields(f"{param}.", asked.as_json, asked.regex, asked.choice, asked.grammar)
    if asked.json_object:
        found.append(json_grammar(ANY_OBJECT, f"{param}.json_object"))
    if not found:
        raise InvalidRequest(
            f"{param} is empty: give one of json, json_object, regex, choice, grammar.", param
        )
    return found


def _of_fields(
    prefix: str,
    schema: JsonSchema | None,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None,
) -> list[pb.Grammar]:
    found = [] if schema is None else [json_grammar(schema, f"{prefix}json")]
    if regex is not None:
        found.append(pb.Grammar(regex=regex, param=f"{prefix}regex"))
    if choice is not None:
        found.append(_one_of(choice, f"{prefix}choice"))
    if grammar is not None:
        found.append(pb.Grammar(ebnf=grammar, param=f"{prefix}grammar"))
    return found


def _one_of(texts: Sequence[str], param: str) -> pb.Grammar:
    if not 0 < len(texts) <= MAX_CHOICES or not all(texts):
        raise InvalidRequest(f"{param} must have 1 to {MAX_CHOICES} texts, none of them empty.", param)
    # a string of Lark's is written as one of JSON
    return pb.Grammar(ebnf="start: " + " | ".join(json.dumps(text) for text in texts), param=param)
