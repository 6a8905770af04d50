"""Reports that the engine gives at any time: its constants, its current work, and the sessions it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from carrel.process.histogram import NOTHING, Distribution
from gpu_worker.records.requests import Budget


@dataclass(frozen=True, slots=True)
class SessionCard:
    """A caller's session in the store: the whole slabs of its last prompt.

    bytes: of the arena; bytes that other sessions hold too are counted in each.
    created_at, last_used_at: Unix times in seconds.
    expires_at: Unix time in seconds at which the pin ends; 0: not by itself.
    """

    session_id: str
    tokens: int
    bytes: int
    created_at: float
    last_used_at: float
    pinned: bool
    expires_at: float


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and current gauges. Slots are counted in tokens, mean over layers and KV heads.

    prefilling: running requests with a prompt in progress.
    prefilling_tokens: tokens of these prompts.
    prefilling_tokens_left: tokens of these prompts that are neither computed nor cached.
    waiting_tokens: tokens of the waiting prompts.
    prompt_tokens_total: counted as they are computed, so that a prompt that was aborted half way counts half.
    cached_tokens_total: tokens of prompts that the store had.
    index_search_seconds to fallbacks_total: what the host does for the KV cache (`KVMeter`).
    decode_stall_seconds: by cause.
    fallbacks_total: by kind.
    selected_tokens_ratio: the share of its context that each request attended.
    """

    running: int = 0
    waiting: int = 0
    prefilling: int = 0
    prefilling_tokens: int = 0
    prefilling_tokens_left: int = 0
    waiting_tokens: int = 0
    slot_used_tokens: float = 0.0
    slot_capacity_tokens: int = 0
    context_capacity: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    requests_finished_total: int = 0
    requests_aborted_total: int = 0
    requests_failed_total: int = 0
    offloaded_bytes_total: int = 0
    fetched_bytes_total: int = 0
    selected_rows_total: int = 0
    hit_rows_total: int = 0
    store_reachable: bool = True
    preemptions_total: int = 0
    corrupt_segments_total: int = 0
    index_search_seconds: Distribution = NOTHING
    gather_seconds: Distribution = NOTHING
    h2d_copy_seconds: Distribution = NOTHING
    offload_seconds: Distribution = NOTHING
    decode_stall_seconds: Mapping[str, Distribution] = field(default_factory=dict)
    fallbacks_total: Mapping[str, int] = field(default_factory=dict)
    selected_tokens_ratio: Distribution = NOTHING


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about the engine that clients need; constant after start."""

    model: str
    model_type: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    policies: tuple[str, ...]
    default_policy: str
    default_budget: Budget
    num_parameters: int
    slot_capacity_tokens: int
    transport: str
    # Of the rows of one token in all layers.
    arena_token_bytes: int = 0
    # Requests of the greatest length at once, with their caches in host memory; 0: not known.
    context_capacity: int = 0
