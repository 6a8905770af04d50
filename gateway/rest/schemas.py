"""Request bodies as OpenAI's clients send them; the service checks what `fields` cannot.

Unknown fields are accepted and ignored, as clients expect, but not inside `carrel`, nor where they would change an
answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from carrel.process.request_limits import MAX_CACHE_SALT_CHARS, MAX_UINT32
from gateway.exchange import Scalar
from gateway.grammars import JsonSchema
from gateway.rest.fields import (
    Budget,
    CacheKey,
    FunctionName,
    NumKept,
    OneByOne,
    OptionName,
    OptionWord,
    PromptTokenIds,
    Refused,
    RequestId,
    SessionName,
    StopTokenIds,
    Texts,
    Timeout,
    TokenId,
    TokenIds,
    TopK,
    within,
)
from gateway.tool_calls.checks import MAX_TOOLS

# in an object that takes only its own
MAX_NAMES = 16


class Body(BaseModel):
    """Numbers may be texts, and whole ones may have a point (`"5"`, `5.0`), as other servers take them."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)

    def written(self) -> bytes:
        """Return the JSON, without fields that are not set. A million token ids take some milliseconds, in which no
        other thread goes on."""
        return self.__pydantic_serializer__.to_json(self, exclude_unset=True, by_alias=True)


class Tagged(Body):
    """A part of an answer or a stream that clients know by its `type`, which is always written."""

    type: str

    def model_post_init(self, context: Any) -> None:
        """Count the type as set."""
        self.__pydantic_fields_set__.add("type")


class CarrelBody(Body):
    # an extension that only our clients write
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def check_number_of_names(cls, value: Any) -> Any:
        """One error for many unknown names: pydantic makes one for each."""
        if isinstance(value, dict) and len(value) > MAX_NAMES:
            raise ValueError(f"{len(value)} names: there are {', '.join(cls.model_fields)}")
        return value

    policy: str | None = None
    budget: Budget | None = None
    options: Annotated[dict[OptionName, bool | int | float | OptionWord], OneByOne] | None = None
    attention: Annotated[
        bool | None, Field(description="let /v1/attention tell what the request attends")
    ] = None


class WorkBody(Body):
    """Whatever gives the worker work: of which model, how soon, with whom it shares, and what is attended."""

    model: str | None = None
    priority: Annotated[int, within("priority")] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    carrel: CarrelBody | None = None


class Sampling(Body):
    """Fields of every API that asks for an answer; the responses API answers with them too."""

    temperature: Annotated[float, within("temperature")] | None = None
    top_p: Annotated[float, within("top_p")] | None = None


class AnswerBody(WorkBody, Sampling):
    """Whatever asks for an answer."""

    stream: bool | None = None
    timeout_seconds: Timeout | None = None
    request_id: Annotated[
        RequestId | None, Field(description="what the answer is called, unless X-Request-Id says it")
    ] = None


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
    reasoning: Annotated[str | None, Field(description="the same, as vLLM calls it")] = None
    audio: Refused = None
    function_call: Refused = None


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
    """The required form of the answer; one of these."""

    model_config = ConfigDict(extra="allow")

    as_json: Annotated[JsonSchema | None, Field(alias="json", description="a JSON schema")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: Annotated[str, Field(description="in Lark's format, or GBNF")] | None = None


class GenerationBody(AnswerBody):
    """The fields that chat and completion share. Others are kept, so that their readers can refuse some."""

    model_config = ConfigDict(extra="allow")

    max_tokens: Annotated[int, within("max_tokens")] | None = None
    max_completion_tokens: Annotated[int, within("max_tokens")] | None = None
    n: Annotated[int, within("n")] | None = None
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
    top_k: TopK | None = None
    min_p: Annotated[float, within("min_p")] | None = None
    repetition_penalty: Annotated[float, within("repetition_penalty")] | None = None
    min_tokens: Annotated[int, within("min_tokens")] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    session_id: SessionName | None = None
    prompt_cache_key: CacheKey = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[
        NumKept | None, Field(description="keep so many of each prompt's last tokens; -1: as many as fit")
    ] = None
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
    defer_loading: Refused = None


class ToolBody(Body):
    type: Literal["function"] = "function"
    function: FunctionBody
    defer_loading: Refused = None


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
    logprobs: bool | None = None
    top_logprobs: Annotated[int, within("logprobs")] | None = None
    tools: Annotated[list[ToolBody] | None, Field(fail_fast=True, max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    chat_template_kwargs: Annotated[dict[str, Scalar], OneByOne] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Annotated[
        OptionWord | None, Field(description="for the chat template, if it knows any")
    ] = None
    include_reasoning: Annotated[
        bool | None, Field(description="false: leave out what the model thinks first")
    ] = None


class CompletionBody(GenerationBody):
    # The longest first: what fits exactly is looked for no further.
    prompt: str | PromptTokenIds | Texts | Annotated[list[PromptTokenIds], Field(fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_UINT32, description="0 only with echo")] | None = None
    logprobs: Annotated[int, within("logprobs")] | None = None
    echo: Annotated[bool | None, Field(description="begin with the prompt, and tell its logprobs too")] = None
    suffix: str | None = None
    best_of: int | None = None


class TokenizeBody(Body):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Refused = None
    chat_template_kwargs: Refused = None
    tools: Refused = None
    return_token_strs: Annotated[
        bool | None, Field(description="tell what the vocabulary calls each token, too")
    ] = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds
