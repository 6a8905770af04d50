"""Messages to records and back; every check of a request's fields is here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from carrel.process.version import Edition, edition_of
from gpu_worker.errors import PromptTooLong, RequestError, VersionMismatch
from gpu_worker.records import (
    Budget,
    CompleteEvent,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    ProgressEvent,
    SamplingParams,
    TokenEvent,
)
from gpu_worker.v1 import gpu_worker_pb2 as pb

MAX_REQUEST_ID_LENGTH = 128
MAX_SALT_BYTES = 64
MAX_SESSION_LENGTH = 128
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/-]+")
_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


def read_request(message: pb.GenerateRequest, info: EngineInfo) -> GenerationRequest:
    """A checked request, with the engine's defaults where the message has none.

    Raises RequestError, which names the field, or PromptTooLong.
    """
    request_id = read_request_id(message.request_id)
    prompt_token_ids = tuple(message.prompt_token_ids)
    if not prompt_token_ids:
        raise RequestError("The prompt is empty; give at least one token id.", "prompt")
    _check_token_ids("prompt", prompt_token_ids, info.vocab_size)
    if message.num_prefill_tokens > len(prompt_token_ids):
        raise RequestError(
            f"num_prefill_tokens is {message.num_prefill_tokens}, but the prompt has "
            f"{len(prompt_token_ids)} tokens.",
            "num_prefill_tokens",
        )
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_read_sampling(message.sampling, len(prompt_token_ids), info),
        policy=_read_policy(message.policy, info),
        budget=_read_budget(message, info),
        num_prefill_tokens=message.num_prefill_tokens,
        measure=message.measure,
        prefix_salt=_read_salt(message.prefix_salt),
        session_id=_read_text("session_id", message.session_id, MAX_SESSION_LENGTH),
    )


def _read_salt(salt: bytes) -> bytes:
    if len(salt) > MAX_SALT_BYTES:
        raise RequestError(f"prefix_salt has {len(salt)} bytes; give at most {MAX_SALT_BYTES}", "prefix_salt")
    return salt


def _read_text(param: str, text: str, limit: int) -> str:
    if len(text) > limit:
        raise RequestError(f"{param} has {len(text)} characters; give at most {limit}", param)
    return text


def read_request_id(request_id: str) -> str:
    """Raises RequestError for an id that is empty, too long or not made of the safe characters."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH or not _REQUEST_ID.fullmatch(request_id):
        raise RequestError(
            f"A request_id has 1 to {MAX_REQUEST_ID_LENGTH} characters of A-Z a-z 0-9 . _ : / -", "request_id"
        )
    return request_id


def _read_sampling(message: pb.SamplingParams, num_prompt_tokens: int, info: EngineInfo) -> SamplingParams:
    max_tokens = message.max_tokens or max(1, info.max_model_len - num_prompt_tokens)
    if num_prompt_tokens + max_tokens > info.max_model_len:
        raise PromptTooLong(num_prompt_tokens, max_tokens, info.max_model_len)
    if message.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {message.min_tokens}, more than max_tokens {max_tokens}.", "min_tokens"
        )
    top_p = message.top_p or 1.0
    repetition_penalty = message.repetition_penalty or 1.0
    _check_range("temperature", message.temperature, 0, 2)
    _check_range("top_p", top_p, 0, 1)
    _check_range("repetition_penalty", repetition_penalty, 0, 2)
    _check_range("presence_penalty", message.presence_penalty, -2, 2)
    _check_range("frequency_penalty", message.frequency_penalty, -2, 2)
    if not 0 <= message.min_p < 1:
        raise RequestError(f"min_p is {message.min_p:g}; it must be at least 0 and below 1.", "min_p")
    if message.HasField("logprobs"):
        _check_range("logprobs", message.logprobs, 0, MAX_LOGPROBS)
    _check_count("stop_token_ids", len(message.stop_token_ids), MAX_STOP_TOKEN_IDS)
    _check_token_ids("stop_token_ids", message.stop_token_ids, info.vocab_size)
    _check_count("logit_bias", len(message.logit_bias), MAX_LOGIT_BIASES)
    _check_token_ids("logit_bias", list(message.logit_bias), info.vocab_size)
    for bias in message.logit_bias.values():
        _check_range("logit_bias", bias, -100, 100)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=top_p,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        repetition_penalty=repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )


def _read_policy(policy: str, info: EngineInfo) -> str:
    if not policy:
        return info.default_policy
    if policy not in info.policies:
        raise RequestError(
            f"Policy {policy[:64]!r} is unknown; the valid ones are {', '.join(info.policies)}.",
            "carrel.policy",
        )
    return policy


def _read_budget(message: pb.GenerateRequest, info: EngineInfo) -> Budget:
    kind = message.budget.WhichOneof("value")
    if kind is None:
        return info.default_budget
    if kind == "share":
        if not 0 < message.budget.share <= 1:
            raise RequestError(
                f"budget is {message.budget.share:g}; a share lies above 0 and up to 1.", "carrel.budget"
            )
        return Budget(share=message.budget.share)
    if message.budget.tokens < 2:
        raise RequestError(
            f"budget is {message.budget.tokens} tokens; it must be 2 or more.", "carrel.budget"
        )
    return Budget(tokens=message.budget.tokens)


def _check_range(param: str, value: float, low: float, high: float) -> None:
    # the negated form also refuses NaN
    if not low <= value <= high:
        raise RequestError(f"{param} is {value:g}; it must lie between {low:g} and {high:g}.", param)


def _check_count(param: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{param} has {count} entries; {limit} are allowed.", param)


def _check_token_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if (greatest := max(token_ids, default=0)) >= vocab_size:
        raise RequestError(
            f"{param} has token id {greatest}, but the model's vocabulary ends at {vocab_size - 1}.", param
        )


def write_token(event: TokenEvent) -> pb.GenerateResponse:
    token = pb.Token(token_id=event.token_id)
    if event.logprob is not None:
        token.logprob = event.logprob
        token.top.extend(pb.TokenLogprob(token_id=i, logprob=logprob) for i, logprob in event.top)
    return pb.GenerateResponse(token=token)


def write_progress(event: ProgressEvent) -> pb.GenerateResponse:
    return pb.GenerateResponse(progress=pb.Progress(prefilled_tokens=event.prefilled_tokens))


def write_complete(event: CompleteEvent) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        complete=pb.Complete(
            finish_reason=_FINISH_REASONS[event.finish_reason],
            stop_token_id=event.stop_token_id or 0,
            # the message has the record's fields, by the same names; None leaves an optional one unset
            usage=pb.Usage(**dataclasses.asdict(event.usage)),
        )
    )


def own_edition() -> Edition:
    """Of a worker towards its callers."""
    return edition_of(pb.DESCRIPTOR.serialized_pb)


def check_edition(message: pb.GenerateRequest) -> None:
    """Raises VersionMismatch for a caller of another edition; one that states none takes what it gets."""
    if message.HasField("edition"):
        caller = Edition(message.edition.version, message.edition.messages)
        if reason := own_edition().refusal("this worker", "the caller", caller):
            raise VersionMismatch(reason)


def write_info(info: EngineInfo) -> pb.GetInfoResponse:
    values = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    values["default_budget"] = write_budget(info.default_budget)
    edition = own_edition()
    return pb.GetInfoResponse(version=edition.version, messages=edition.messages, **values)


def write_budget(budget: Budget) -> pb.Budget:
    return pb.Budget(share=budget.share) if budget.tokens is None else pb.Budget(tokens=budget.tokens)


def write_stats(stats: EngineStats) -> pb.StatsResponse:
    return pb.StatsResponse(**dataclasses.asdict(stats))
