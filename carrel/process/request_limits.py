"""Limits of a request's fields, for REST, chat gRPC and the worker. Defaults: `gpu_worker.records`.

The functions take the worker's own messages (proto/gpu_worker/v1/gpu_worker.proto), and import nothing of theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from carrel.process.policy_names import choices

# of one request, all prompts together
MAX_CHOICES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_SESSION_CHARS = 128
MAX_CACHE_SALT_CHARS = 256
MAX_GRAMMAR_BYTES = 128 * 2**10
# Between two parts of JSON that a grammar makes. A model that loses itself in white space never ends: it may write one
# space or indent once.
JSON_WHITE_SPACE = r" |\n( {0,20}|\t{0,5})"
# 30 days
MAX_PIN_SECONDS = 30 * 86400
MIN_BUDGET_TOKENS = 2
# of a policy, and characters of the name or value of one
MAX_OPTIONS, MAX_OPTION_TEXT = 16, 64
MAX_UINT32 = 2**32 - 1


# In the trailing metadata of a refusal by gRPC, what a LimitError says beside its text.
PARAM_KEY = "carrel-param"
CODE_KEY = "carrel-code"


class LimitError(ValueError):
    """A field that is out of its limits: `param` is its name in the API, `code` a word for programs."""

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `ge` on, or above `gt`; up to `le`, or below `lt`. The words are those of pydantic's constraints."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, value: float) -> bool:
        # a NaN fails every comparison
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        low = f"({self.gt}" if self.ge is None else f"[{self.ge}"
        high = f"{self.lt})" if self.le is None else f"{self.le}]"
        return f"{low}, {high}"


RANGES: Mapping[str, Range] = {
    "n": Range(ge=1, le=MAX_CHOICES),
    "max_tokens": Range(ge=1, le=MAX_UINT32),
    "min_tokens": Range(ge=0, le=MAX_UINT32),
    "temperature": Range(ge=0, le=2),
    # 0: the likeliest token alone
    "top_p": Range(ge=0, le=1),
    "top_k": Range(ge=0, le=MAX_UINT32),
    "min_p": Range(ge=0, lt=1),
    "repetition_penalty": Range(ge=2.0**-10, le=2),
    "presence_penalty": Range(ge=-2, le=2),
    "frequency_penalty": Range(ge=-2, le=2),
    # of REST; the worker takes all of uint64
    "seed": Range(ge=-(2**63), lt=2**63),
    "logprobs": Range(ge=0, le=MAX_LOGPROBS),
    "logit_bias": Range(ge=-100, le=100),
    # of every message
    "priority": Range(ge=-(2**31), le=2**31 - 1),
    "budget_share": Range(gt=0, le=1),
}


class ModelLimits(Protocol):
    """Limits that the worker reports: a GetInfoResponse, or the engine's own record."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def policies(self) -> Collection[str]: ...


def check_request(request: Any, model: ModelLimits) -> None:
    """Check all of a GenerateRequest but its prompt. Raises LimitError."""
    if request.policy and request.policy not in model.policies:
        asked = request.policy[:64]
        named = choices(asked, model.policies)
        end = "" if named.endswith("?") else "."
        raise LimitError(f"This server has no policy {asked!r}: {named}{end}", "carrel.policy")
    texts = (text for pair in request.policy_options.items() for text in pair)
    if len(request.policy_options) > MAX_OPTIONS or any(len(text) > MAX_OPTION_TEXT for text in texts):
        raise LimitError(
            f"Give at most {MAX_OPTIONS} options of a policy, of {MAX_OPTION_TEXT} characters each.",
            "carrel.options",
        )
    match request.budget.WhichOneof("value"):
        case "share" if request.budget.share not in RANGES["budget_share"]:
            raise LimitError(
                f"The budget is {request.budget.share:g}: a share of the prompt is in {RANGES['budget_share']}.",
                "carrel.budget",
            )
        case "tokens" if request.budget.tokens < MIN_BUDGET_TOKENS:
            raise LimitError(
                f"The budget is {request.budget.tokens} tokens: give {MIN_BUDGET_TOKENS} or more.",
                "carrel.budget",
            )
    if len(request.session_id) > MAX_SESSION_CHARS:
        raise LimitError(f"A session_id has at most {MAX_SESSION_CHARS} characters.", "session_id")
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise LimitError(f"A cache_salt has at most {MAX_CACHE_SALT_CHARS} characters.", "cache_salt")
    check_grammar(request.grammar)
    _check_sampling(request.sampling, model.vocab_size)


def check_grammar(grammar: Any) -> None:
    """Check a GenerateRequest's grammar. Raises LimitError for its size."""
    if (size := grammar.ByteSize()) > MAX_GRAMMAR_BYTES:
        raise LimitError(f"{grammar.param} has {size} bytes; {MAX_GRAMMAR_BYTES} are allowed.", grammar.param)


def check_token_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises LimitError for an id that the model does not know; none is negative."""
    if (greatest := max(token_ids, default=0)) >= vocab_size:
        raise LimitError(
            f"{param} has token id {greatest}, but the model's vocabulary ends at {vocab_size - 1}.", param
        )


def num_output_tokens(sampling: Any, num_prompt_tokens: int, max_model_len: int, prompt_param: str) -> int:
    """How many tokens may be generated: those asked for, or all that fit. Raises LimitError about `prompt_param` when
    they do not fit, and about `min_tokens` above them."""
    room = max_model_len - num_prompt_tokens
    wanted = sampling.max_tokens if sampling.HasField("max_tokens") else max(1, room)
    if wanted > room:
        raise context_overflow(max_model_len, wanted, str(num_prompt_tokens), prompt_param)
    if sampling.min_tokens > wanted:
        raise LimitError(
            f"min_tokens is {sampling.min_tokens}, more than max_tokens, {wanted}.", "min_tokens"
        )
    return int(wanted)


def context_overflow(max_model_len: int, max_tokens: int, num_prompt_tokens: str, param: str) -> LimitError:
    """Prompt and completion do not fit the model's maximum length, in the words that OpenAI's clients know."""
    return LimitError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{max_tokens} output tokens and your prompt contains {num_prompt_tokens} input tokens. "
        "Please reduce the length of the input prompt or the number of requested output tokens.",
        param,
        "context_length_exceeded",
    )


def _check_sampling(sampling: Any, vocab_size: int) -> None:
    for field, value in sampling.ListFields():
        match field.name:
            case "seed" | "ignore_eos":
                pass
            case "stop_token_ids":
                _check_count(field.name, len(value), MAX_STOP_TOKEN_IDS)
                check_token_ids(field.name, value, vocab_size)
            case "logit_bias":
                _check_count(field.name, len(value), MAX_LOGIT_BIASES)
                check_token_ids(field.name, value, vocab_size)
                for bias in value.values():
                    _check_range(field.name, bias)
            case "prompt_logprobs":
                _check_range("logprobs", value)
            case name:
                _check_range(name, value)


def _check_count(param: str, count: int, limit: int) -> None:
    if count > limit:
        raise LimitError(f"{param} has {count} entries; {limit} are allowed.", param)


def _check_range(name: str, value: float) -> None:
    if value not in RANGES[name]:
        raise LimitError(f"{name} is {value:g}; it must be in {RANGES[name]}.", name)
