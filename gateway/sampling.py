"""Ranges and defaults of everything that steers generation."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.errors import ContextOverflow, InvalidRequest
from gateway.generation_defaults import GenerationDefaults
from gateway.records import GenerationOptions, SamplingParams, WorkerInfo

MAX_CHOICES_PER_PROMPT = 8
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_SESSION_CHARS = 128
INT64 = 2**63


def check_text(text: str, param: str) -> None:
    """Raises InvalidRequest for text that no tokenizer should see."""
    if "\x00" in text:
        raise InvalidRequest("The text holds a NUL character; remove it.", param)
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise InvalidRequest("The text is not valid Unicode: it holds a lone surrogate.", param) from exc


def check_token_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest for an id outside the model's vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"Token id {token_id} is outside the vocabulary of {vocab_size}.", param)


def check_options(options: GenerationOptions, info: WorkerInfo) -> None:
    """Check every range that needs no prompt. Raises InvalidRequest that names the field."""
    if options.session_id is not None:
        check_text(options.session_id, "session_id")
        if not 0 < len(options.session_id) <= MAX_SESSION_CHARS:
            raise InvalidRequest(f"A session_id must have 1 to {MAX_SESSION_CHARS} characters.", "session_id")
    _within("n", options.n, 1, MAX_CHOICES_PER_PROMPT)
    _within("max_tokens", options.max_tokens, 1, INT64)
    _within("temperature", options.temperature, 0, 2)
    _within("top_p", options.top_p, 0, 1, is_low_open=True)
    _within("top_k", options.top_k, -1, INT64)
    _within("min_p", options.min_p, 0, 1, is_high_open=True)
    _within("seed", options.seed, -INT64, INT64 - 1)
    _within("presence_penalty", options.presence_penalty, -2, 2)
    _within("frequency_penalty", options.frequency_penalty, -2, 2)
    _within("repetition_penalty", options.repetition_penalty, 0, 100, is_low_open=True)
    _within("min_tokens", options.min_tokens, 0, INT64)
    _within("logprobs", options.logprobs, 0, MAX_LOGPROBS)
    _at_most("stop", len(options.stop), MAX_STOP_STRINGS)
    for stop in options.stop:
        check_text(stop, "stop")
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"A stop string must have 1 to {MAX_STOP_CHARS} characters.", "stop")
    _at_most("stop_token_ids", len(options.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids(options.stop_token_ids, info.vocab_size, "stop_token_ids")
    _at_most("logit_bias", len(options.logit_bias), MAX_LOGIT_BIASES)
    check_token_ids(options.logit_bias, info.vocab_size, "logit_bias")
    for bias in options.logit_bias.values():
        _within("logit_bias", bias, -100, 100)


def resolve_sampling(
    options: GenerationOptions,
    defaults: GenerationDefaults,
    info: WorkerInfo,
    num_prompt_tokens: int,
    default_max_tokens: int | None,
    prompt_param: str,
) -> SamplingParams:
    """Apply the defaults and fit the completion into the context; `default_max_tokens` None means all of the rest.

    Raises ContextOverflow when prompt and completion do not fit, InvalidRequest for `min_tokens` above them.
    """
    room = info.max_model_len - num_prompt_tokens
    asked = options.max_tokens
    if asked is None and default_max_tokens is not None and room > 0:
        asked = min(default_max_tokens, room)
    max_tokens = max(room, 1) if asked is None else asked
    if max_tokens > room:
        raise ContextOverflow(info.max_model_len, max_tokens, num_prompt_tokens, prompt_param)
    if options.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {options.min_tokens}, more than the {max_tokens} output tokens.", "min_tokens"
        )
    top_k = defaults.top_k if options.top_k is None else max(options.top_k, 0)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_pick(options.temperature, defaults.temperature),
        top_p=_pick(options.top_p, defaults.top_p),
        top_k=min(int(top_k), info.vocab_size),
        min_p=_pick(options.min_p, defaults.min_p),
        seed=None if options.seed is None else options.seed % 2**64,
        repetition_penalty=_pick(options.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        min_tokens=options.min_tokens,
        logprobs=options.logprobs,
        logit_bias=tuple(options.logit_bias.items()),
    )


def _pick(value: float | None, default: float) -> float:
    return default if value is None else value


def _at_most(param: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{param} has {count} entries; at most {limit} are allowed.", param)


def _within(
    param: str,
    value: float | None,
    low: float,
    high: float,
    is_low_open: bool = False,
    is_high_open: bool = False,
) -> None:
    if value is None:
        return
    # a NaN fails every comparison
    is_above = value > low if is_low_open else value >= low
    is_below = value < high if is_high_open else value <= high
    if not (is_above and is_below):
        brackets = ("(" if is_low_open else "[") + "{}, {}" + (")" if is_high_open else "]")
        raise InvalidRequest(f"{param} must be in {brackets.format(low, high)}.", param)
