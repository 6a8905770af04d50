"""Messages to records and back; a request is checked here, and nowhere else in the worker."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator

from carrel.process.request_limits import (
    MAX_PIN_SECONDS,
    LimitError,
    check_request,
    check_token_ids,
    num_output_tokens,
)
from carrel.process.version import Edition, edition_of
from gpu_worker.errors import RequestError, VersionMismatch
from gpu_worker.records import (
    AttentionEvent,
    Budget,
    CompleteEvent,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    ProgressEvent,
    PromptEvent,
    SamplingParams,
    SessionCard,
    TokenEvent,
)
from gpu_worker.v1 import gpu_worker_pb2 as pb
from kv_store.client import StoreStats

MAX_REQUEST_ID_LENGTH = 128
MAX_SALT_BYTES = 64
MAX_WEIGHT = 1e6
# Of one message that says how likely a prompt's tokens are; it takes some milliseconds to make.
PROMPT_TOKENS = 256

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/-]+")
_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


def read_request(message: pb.GenerateRequest, info: EngineInfo) -> GenerationRequest:
    """A checked request, with the engine's defaults where the message has none. Raises RequestError."""
    request_id = read_request_id(message.request_id)
    prompt_token_ids = tuple(message.prompt_token_ids)
    if not prompt_token_ids:
        raise RequestError("The prompt is empty; give at least one token id.", "prompt")
    if message.num_prefill_tokens > len(prompt_token_ids):
        raise RequestError(
            f"num_prefill_tokens is {message.num_prefill_tokens}, but the prompt has "
            f"{len(prompt_token_ids)} tokens.",
            "num_prefill_tokens",
        )
    if message.num_prefill_tokens and message.sampling.HasField("prompt_logprobs"):
        raise RequestError("num_prefill_tokens and prompt_logprobs exclude each other", "num_prefill_tokens")
    if len(message.prefix_salt) > MAX_SALT_BYTES:
        raise RequestError(
            f"prefix_salt has {len(message.prefix_salt)} bytes; give at most {MAX_SALT_BYTES}", "prefix_salt"
        )
    if not 0 <= message.weight <= MAX_WEIGHT:
        raise RequestError(f"weight is {message.weight:g}; give one from 0 to {MAX_WEIGHT:g}", "weight")
    try:
        check_request(message, info)
        max_tokens = num_output_tokens(message.sampling, len(prompt_token_ids), info.max_model_len, "prompt")
        check_token_ids("prompt", prompt_token_ids, info.vocab_size)
    except LimitError as error:
        raise RequestError(str(error), error.param, error.code) from error
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_read_sampling(message.sampling, max_tokens),
        policy=message.policy or info.default_policy,
        budget=_read_budget(message) or info.default_budget,
        num_prefill_tokens=message.num_prefill_tokens,
        measure=message.measure,
        prefix_salt=message.prefix_salt,
        session_id=message.session_id,
        weight=message.weight or 1.0,
        cache_salt=message.cache_salt,
        priority=message.priority,
        policy_options=tuple(sorted(message.policy_options.items())),
        attention=message.attention,
    )


def read_grammar(message: pb.GenerateRequest) -> Grammar | None:
    """None where the answer may be anything."""
    if (kind := message.grammar.WhichOneof("kind")) is None:
        return None
    return Grammar(GrammarKind(kind), getattr(message.grammar, kind), message.grammar.param)


def read_request_id(request_id: str) -> str:
    """Raises RequestError for an id that is empty, too long or not made of the safe characters."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH or not _REQUEST_ID.fullmatch(request_id):
        raise RequestError(
            f"A request_id has 1 to {MAX_REQUEST_ID_LENGTH} characters of A-Z a-z 0-9 . _ : / -", "request_id"
        )
    return request_id


def _read_sampling(message: pb.SamplingParams, max_tokens: int) -> SamplingParams:
    """The record has the message's fields, by the same names, and the defaults of what is absent."""
    present = {field.name: value for field, value in message.ListFields()}
    return SamplingParams(
        **{
            **present,
            "max_tokens": max_tokens,
            "stop_token_ids": tuple(message.stop_token_ids),
            "logit_bias": tuple(sorted(message.logit_bias.items())),
        }
    )


def _read_budget(message: pb.GenerateRequest) -> Budget | None:
    match message.budget.WhichOneof("value"):
        case "share":
            return Budget(share=message.budget.share)
        case "tokens":
            return Budget(tokens=message.budget.tokens)
        case _:
            return None


def write_token(event: TokenEvent) -> pb.GenerateResponse:
    message = pb.GenerateResponse()
    message.token.token_id = event.token_id
    if event.logprob is not None:
        message.token.logprob = event.logprob
        _write_top(message.token, event.top)
    return message


def write_prompt(event: PromptEvent) -> Iterator[pb.GenerateResponse]:
    """Messages of `PROMPT_TOKENS` each, made as they are asked for: others have the event loop between two."""
    for begin in range(0, len(event.token_ids), PROMPT_TOKENS):
        part = slice(begin, begin + PROMPT_TOKENS)
        rows = zip(
            event.token_ids[part], event.logprobs[part].tolist(), event.numbers[part].tolist(), strict=True
        )
        message = pb.GenerateResponse()
        for token_id, (logprob, *logprobs), (rank, *ids) in rows:
            token = message.prompt.tokens.add(token_id=token_id, logprob=logprob, rank=rank)
            _write_top(token, zip(ids, logprobs, strict=True))
        yield message


def _write_top(token: pb.Token, top: Iterable[tuple[int, float]]) -> None:
    for token_id, logprob in top:
        token.top.add(token_id=token_id, logprob=logprob)


def write_progress(event: ProgressEvent) -> pb.GenerateResponse:
    return pb.GenerateResponse(progress=pb.Progress(**dataclasses.asdict(event)))


def write_attention(event: AttentionEvent) -> pb.GenerateResponse:
    """The message has the record's fields, by the same names."""
    return pb.GenerateResponse(attention=pb.Attention(**dataclasses.asdict(event)))


def write_complete(event: CompleteEvent) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        complete=pb.Complete(
            finish_reason=_FINISH_REASONS[event.finish_reason],
            stop_token_id=event.stop_token_id or 0,
            # the message has the record's fields, by the same names; None leaves an optional one unset
            usage=pb.Usage(**dataclasses.asdict(event.usage)),
        )
    )


@functools.cache
def own_edition() -> Edition:
    """Return the edition of the protocol that a worker offers its callers."""
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


def read_seconds(seconds: float) -> float:
    """Raises RequestError for what is no time to come."""
    if not 0 <= seconds <= MAX_PIN_SECONDS:
        raise RequestError(f"seconds is {seconds:g}; give 0 to {MAX_PIN_SECONDS}", "ttl_seconds")
    return seconds


def write_session(card: SessionCard) -> pb.Session:
    """The message has the record's fields, by the same names."""
    return pb.Session(**dataclasses.asdict(card))


def write_stats(stats: EngineStats) -> pb.StatsResponse:
    return pb.StatsResponse(**dataclasses.asdict(stats))


def write_store_stats(stats: StoreStats) -> pb.StoreStatsResponse:
    """Under the names of metrics, of which those that end in `_total` count, and in `_seconds` are histograms."""
    return pb.StoreStatsResponse(
        arena_bytes=stats.arena_bytes,
        reserved_bytes=stats.reserved_bytes,
        leased_bytes=stats.leased_bytes,
        index_bytes=stats.index_bytes,
        pinned_bytes=stats.pinned_bytes,
        sequences=stats.num_sequences,
        indexes=stats.num_indexes,
        leases=stats.num_workers,
        sessions=stats.num_sessions,
        prefix_lookup_tokens_total=stats.prefix_lookup_tokens,
        prefix_hit_tokens_total=stats.prefix_hit_tokens,
        evicted_bytes_total=stats.evicted_bytes,
        evicted_sessions_total=stats.evicted_sessions,
        expired_leases_total=stats.expired_leases,
        gathered_rows_total=stats.gathered_rows,
        index_trainings_total=stats.num_trainings,
        index_training_seconds_total=stats.training_seconds,
        call_bounds=stats.call_bounds,
        calls=[pb.StoreCalls(**dataclasses.asdict(each)) for each in stats.calls],
        disk_bytes=stats.disk.num_bytes,
        disk_written_bytes_total=stats.disk.written_bytes,
        disk_read_bytes_total=stats.disk.read_bytes,
        disk_skipped_total=stats.disk.num_skipped,
        disk_errors_total=stats.disk.num_errors,
        disk_corrupt_files_total=stats.disk.num_corrupt,
        disk_lookup_tokens_total=stats.disk.lookup_tokens,
        disk_hit_tokens_total=stats.disk.hit_tokens,
        index_queue_length=stats.num_pending_trainings,
        **{f"{name}_seconds": histogram for name, histogram in dataclasses.asdict(stats.times).items()},
    )
