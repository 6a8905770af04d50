"""Constraints of an answer's form in a message, to the worker's grammar."""

from __future__ import annotations

from gateway.grammars import json_grammar, only_one, structured
from gateway.v1 import chat_pb2 as pb
from gpu_worker.v1 import gpu_worker_pb2


def read_grammar(message: pb.ChatRequest) -> gpu_worker_pb2.Grammar | None:
    """None where the answer may be anything. Raises InvalidRequest for a field that says nothing, and for two."""
    found = [json_grammar(message.json_schema, "json_schema")] if message.json_schema else []
    if message.HasField("structured_outputs"):
        found += _of_structured_outputs(message.structured_outputs)
    return only_one(found)


def _of_structured_outputs(asked: pb.StructuredOutputs) -> list[gpu_worker_pb2.Grammar]:
    kind = asked.WhichOneof("kind")
    return structured(
        asked.json if kind == "json" else None,
        asked.json_object,
        asked.regex if kind == "regex" else None,
        asked.choice.texts if kind == "choice" else None,
        asked.grammar if kind == "grammar" else None,
    )
