"""Request bodies as OpenAI's clients send them, with the ranges of their numbers; the service checks the rest.

Unknown fields are accepted and ignored, as clients expect, but not inside `carrel`, nor where they would change an
answer.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from carrel.process.request_limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_SESSION_CHARS,
    MAX_UINT32,
    MIN_BUDGET_TOKENS,
    RANGES,
)
from gateway.exchange import Scalar
from gateway.grammars import JsonSchema
from gateway.tool_calls.checks import FUNCTION_NAME, MAX_TOOLS

TokenId = Annotated[int, Field(ge=0, le=MAX_UINT32)]
# of a prompt: one of texts that are numbers is one of texts
PromptTokenId = Annotated[int, Field(ge=0, le=MAX_UINT32, strict=True)]
# Of a long list one error is enough: pydantic makes one for each item, and for each kind of list that it might be.
# Objects have no `fail_fast`: see `OneByOne`.
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
PromptTokenIds = Annotated[list[PromptTokenId], Field(fail_fast=True)]


def _one_by_one(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """An object, checked as far as its first wrong entry."""
    if type(value) is not dict:
        return check(value)
    checked: dict[Any, Any] = {}
    entries = iter(value.items())
    while some := dict(islice(entries, NUM_AT_ONCE)):
        try:
            checked |= check(some)
        except ValidationError:
            for name, each in some.items():
                check({name: each})
            raise
    return checked


# of an object: entries that are checked together, where all of them are right
NUM_AT_ONCE = 256
OneByOne = WrapValidator(_one_by_one)


def within(name: str) -> Any:
    """pydantic's constraint for the range of that name."""
    return Field(**asdict(RANGES[name]))


def _check_budget(value: float) -> float:
    if value in RANGES["budget_share"] or (value >= MIN_BUDGET_TOKENS and value == int(value)):
        return value
    raise ValueError(
        f"give a share of the context in {RANGES['budget_share']}, or a whole number of tokens from "
        f"{MIN_BUDGET_TOKENS} up"
    )


# what is not done by then ends with 504; less than what the server gives every request
Timeout = Annotated[float, Field(gt=0)]


class Body(BaseModel):
    """Numbers may be texts, and whole ones may have a point (`"5"`, `5.0`), as other servers take them."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


# nothing that a policy's field is called, or may be, has other characters
OptionName = Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,64}$")]
OptionWord = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+-]{1,64}$")]


BUDGET = {
    "description": "tokens attended: a share of the context up to 1, else a number of tokens",
    "anyOf": [
        {
            "type": "number",
            "exclusiveMinimum": RANGES["budget_share"].gt,
            "maximum": RANGES["budget_share"].le,
        },
        {"type": "integer", "minimum": MIN_BUDGET_TOKENS},
    ],
}


class CarrelBody(Body):
    # an extension that only our clients write
    model_config = ConfigDict(extra="forbid", strict=True)

    policy: str | None = None
    budget: (
        Annotated[
            int | float,
            AfterValidator(_check_budget),
            WithJsonSchema(BUDGET),
        ]
        | None
    ) = None
    options: Annotated[dict[OptionName, bool | int | float | OptionWord], OneByOne] | None = None
    attention: Annotated[
        bool | None, Field(description="let /v1/attention tell what the request attends")
    ] = None


class WorkBody(Body):
    """Whatever gives the worker work: how soon, with whom it shares, and what is attended."""

    priority: Annotated[int, within("priority")] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    carrel: CarrelBody | None = None


class AnswerBody(WorkBody):
    """Whatever asks for an answer."""

    timeout_seconds: Timeout | None = None


class StreamOptions(Body):
    include_usage: Annotated[bool | None, Field(description="tell the usage in a last chunk")] = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="tell the tokens so far in every chunk")
    ] = None
    include_progress: Annotated[
        bool | None, Field(description="tell in chunks of their own how far the prompts are")
    ] = None


class TextPart(Body):
    type: str
    text: str | None = None


FunctionName = Annotated[str, StringConstraints(pattern=FUNCTION_NAME)]


class CalledFunction(Body):
    name: FunctionName
    arguments: Annotated[str, Field(description="JSON, an object")]


class ToolCallBody(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class MessageBody(Body):
    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody] | None, Field(fail_fast=True, description="an assistant's")] = (
        None
    )
    tool_call_id: Annotated[str | None, Field(description="a tool's: the call that this answers")] = None
    reasoning_content: Annotated[str | None, Field(description="an assistant's, before its content")] = None


Messages = Annotated[list[MessageBody], Field(fail_fast=True)]


class NamedSchema(Body):
    """`strict` changes nothing: an answer is always held to the schema."""

    name: str | None = None
    description: str | None = None
    json_schema: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Annotated[str, Field(description="text, json_object or json_schema")]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """What the answer must be; one of these."""

    model_config = ConfigDict(extra="allow")

    as_json: Annotated[JsonSchema | None, Field(alias="json", description="a JSON schema")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: Annotated[str, Field(description="in Lark's format, or GBNF")] | None = None


class GenerationBody(AnswerBody):
    """The fields that chat and completion share. Others are kept, so that their readers can refuse some."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: Annotated[int, within("max_tokens")] | None = None
    temperature: Annotated[float, within("temperature")] | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    n: Annotated[int, within("n")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Texts | None = None
    include_stop_str_in_output: Annotated[
        bool | None, Field(description="end with the stop string, not before it")
    ] = None
    skip_special_tokens: Annotated[
        bool | None, Field(description="true by default; false: the text has them by their names")
    ] = None
    presence_penalty: Annotated[float, within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, within("frequency_penalty")] | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[float, within("logit_bias")]], OneByOne] | None = None
    seed: Annotated[int, within("seed")] | None = None
    prompt_logprobs: Annotated[
        Annotated[int, within("logprobs")] | None,
        Field(description="of the prompt's tokens, but in no stream"),
    ] = None
    user: str | None = None
    # -1 is off, as 0 is
    top_k: Annotated[int, Field(ge=-1, le=MAX_UINT32)] | None = None
    min_p: Annotated[float, within("min_p")] | None = None
    repetition_penalty: Annotated[float, within("repetition_penalty")] | None = None
    min_tokens: Annotated[int, within("min_tokens")] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=MAX_SESSION_CHARS)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    return_token_ids: Annotated[
        bool | None, Field(description="of prompt and answer, beside their texts")
    ] = None


class FunctionBody(Body):
    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="a JSON schema, of an object")] = None
    strict: bool | None = None


class ToolBody(Body):
    type: Literal["function"] = "function"
    function: FunctionBody


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatBody(GenerationBody):
    messages: Messages
    max_completion_tokens: Annotated[int, within("max_tokens")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, within("logprobs")] | None = None
    tools: Annotated[list[ToolBody] | None, Field(fail_fast=True, max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    chat_template_kwargs: Annotated[dict[str, Scalar], OneByOne] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(GenerationBody):
    # The longest first: what fits exactly is looked for no further.
    prompt: str | PromptTokenIds | Texts | Annotated[list[PromptTokenIds], Field(fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_UINT32, description="0 only with echo")] | None = None
    logprobs: Annotated[int, within("logprobs")] | None = None
    echo: Annotated[bool | None, Field(description="begin with the prompt, and tell its logprobs too")] = None
    suffix: str | None = None
    best_of: int | None = None


class EmbeddingsBody(Body):
    """Of a route that is refused."""


class TokenizeBody(Body):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds
