"""Constraints of an answer's form, in OpenAI's and vLLM's fields, to the worker's grammar."""

from __future__ import annotations

from gateway.errors import InvalidRequest
from gateway.grammars import ANY_OBJECT, grammars_of, json_grammar, only_one, structured
from gateway.rest.schemas import GenerationBody, ResponseFormat, StructuredOutputs
from gpu_worker.v1 import gpu_worker_pb2 as pb


def read_grammar(body: GenerationBody) -> pb.Grammar | None:
    """None where the answer may be anything. Raises InvalidRequest for a field that says nothing, and for two."""
    return only_one(
        [
            *_of_response_format(body.response_format),
            *_of_structured_outputs(body.structured_outputs),
            *grammars_of(
                "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
            ),
        ]
    )


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
    return structured(asked.as_json, bool(asked.json_object), asked.regex, asked.choice, asked.grammar)
