"""Request bodies as OpenAI's clients send them. Types only: the service checks ranges.

Unknown fields are accepted and ignored, as clients expect, but not inside `carrel`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator, field_validator

from gateway.carrel_options import read_budget
from gateway.records import Budget, Scalar

TOOLS_REMEDY = "this server calls no tools; leave the field out"


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class CarrelBody(Body):
    model_config = ConfigDict(extra="forbid")

    policy: str | None = None
    budget: Annotated[
        Budget | None,
        PlainValidator(
            lambda value: None if value is None else read_budget(value), json_schema_input_type=float
        ),
    ] = None


class StreamOptions(Body):
    include_usage: bool | None = None


class TextPart(Body):
    type: str
    text: str | None = None


class MessageBody(Body):
    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[Any] | None = None


class ResponseFormat(Body):
    type: str


class GenerationBody(Body):
    """The fields that chat and completion share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    session_id: str | None = None
    carrel: CarrelBody | None = None

    @field_validator("logit_bias")
    @classmethod
    def _bias_keys_are_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value and not all(key.isascii() and key.isdigit() and len(key) < 12 for key in value):
            raise ValueError("the keys must be token ids")
        return value


class ChatBody(GenerationBody):
    messages: list[MessageBody]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None


class CompletionBody(GenerationBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class TokenizeBody(Body):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]
