"""Requests and answers of the gateway in any protocol; the worker's own are protobuf messages."""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_worker.v1 import gpu_worker_pb2 as pb

Scalar = str | int | float | bool | None
# never copied on its way to the worker: of a prompt there may be a million
TokenIds = Sequence[int]

# of a prompt's tokens, beside those of the answer
AS_MANY_AS_FIT = -1

PLAIN_ID = r"[A-Za-z0-9._-]{1,64}"


def public_id(asked: str | None) -> str:
    """The client's own request id if it is short and plain, else a new one: an id goes into headers and logs."""
    return asked if asked and re.fullmatch(PLAIN_ID, asked) else uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """`tool_calls`: of an assistant. `tool_call_id`: of a tool, which call this answers. `name`: of the tool, or of who
    speaks. `reasoning`: what an assistant thought before its content."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None

    @property
    def num_chars(self) -> int:
        """Characters of all its texts."""
        calls = [text for each in self.tool_calls for text in (each.id, each.name, each.arguments)]
        texts = (self.role, self.content, self.tool_call_id, self.name, self.reasoning, *calls)
        return sum(len(text) for text in texts if text is not None)


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options of a request besides its prompt.

    `draft`: the worker's request so far, with what the client set of sampling, policy, budget, session, priority, and
    `prefix_salt` (see `KeyRing.caller`). `add_special_tokens` None: to a completion, not to a chat, whose template
    writes them. `truncate_to`: of each prompt only so many tokens are kept, the last, or AS_MANY_AS_FIT; None: all.
    `timeout_s`: what it may take, where that is less than what any may. `keeps_stop`: the answer ends with its stop
    string, not before it. `shows_special`: its text has special tokens by their names.
    """

    model: str | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    add_special_tokens: bool | None = None
    truncate_to: int | None = None
    timeout_s: float | None = None
    keeps_stop: bool = False
    shows_special: bool = False
    draft: pb.GenerateRequest = field(default_factory=pb.GenerateRequest)


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters`: the JSON schema of its arguments, an object's. `strict`: calls are held to it even where none is
    required."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False


class ToolChoice(enum.Enum):
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools that a chat's answer may call, or with REQUIRED must. `named`: the only one it may call; None: any.
    `is_parallel`: several calls may be in one answer."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice.AUTO
    named: str | None = None
    is_parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.named in (None, tool.name))


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The answer begins where an assistant's message would, if `adds_generation_prompt`, or where the last message
    ends, if `continues_final`; not both. `tools`: None: nothing is called. `tells_reasoning`: what the model thinks
    first comes in events of its own, where its template says so; else it is text. `hides_reasoning`: in no event then.
    `reasoning_effort`: for the template, which must know it."""

    messages: tuple[Message, ...]
    options: GenerationOptions = GenerationOptions()
    template_arguments: Mapping[str, Scalar] = field(default_factory=dict)
    request_id: str | None = None
    adds_generation_prompt: bool = True
    continues_final: bool = False
    tools: Tools | None = None
    tells_reasoning: bool = False
    hides_reasoning: bool = False
    reasoning_effort: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Each prompt is text or token ids. `echoes`: the answer begins with the prompt; `only_echoes`: it ends there."""

    prompts: tuple[str | TokenIds, ...]
    options: GenerationOptions = GenerationOptions()
    request_id: str | None = None
    echoes: bool = False
    only_echoes: bool = False


@dataclass(frozen=True, slots=True)
class Echo:
    """The text of a prompt, that a choice begins with; `is_all`: and ends with, whatever token follows."""

    text: str
    is_all: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token by its id, as text and as bytes, its log probability, which the first of a prompt has not, and the best
    alternatives in order. `rank`: of a prompt's token among all, the likeliest 1."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a whole request, all choices together; `worker` is None when no account of the worker arrived."""

    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float
    worker: pb.Usage | None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def cached_tokens(self) -> int:
        return 0 if self.worker is None else self.worker.cached_tokens


@dataclass(frozen=True, slots=True)
class Prefilling:
    """How far a request's prompts are, all together; also the sign that the worker began with one.

    computed_tokens and cached_tokens, of a known prefix, are all of prompt_tokens when it is done.
    """

    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice; the text may be empty when only logprobs are new.

    `token_ids`: that came since its last one; their text may come later. `prompt_token_ids`: with the choice's first.
    `prompt_logprobs`: of the prompt's next tokens, from its second on, where they were asked for; those that an echo
    tells are in `logprobs` too.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: Sequence[int] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before the answer, in a chat that asked to be told."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call of one choice, its `place` counted from 0, in a chat with tools: first its id and name, then
    pieces of its arguments, which add up to a JSON object."""

    index: int
    place: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """Comes once per choice. `finish_reason` is OpenAI's word: stop, length or tool_calls. `stop`: the string that
    ended it."""

    index: int
    finish_reason: str
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """The last event of a request that ended well."""

    usage: Usage


Event = Prefilling | TextDelta | ReasoningDelta | ToolCallDelta | ChoiceFinished | Completed


@dataclass(frozen=True, slots=True)
class Generation:
    """An admitted request. `events` must be iterated to its end or closed: both free the admission."""

    request_id: str
    model: str
    created: int
    events: AsyncGenerator[Event, None]
