"""Requests to the engine: a prompt, how its answer is sampled, and what it may cost."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens attended per KV head and layer, sinks and window included: a share of the prompt or a number.

    Exactly one of them is set: `share` in (0, 1], `tokens` from 2 up. least: what a share is at least, in tokens: a
    tenth of a short chat is next to nothing.
    """

    share: float | None = None
    tokens: int | None = None
    least: int = 0

    @classmethod
    def of(cls, number: float) -> Budget:
        """Read one number: a share up to 1, and tokens above."""
        return cls(tokens=int(number)) if number > 1 else cls(share=number)

    def resolve(self, num_prompt_tokens: int) -> int:
        """Budget in tokens for a prompt of this length; at least the prompt's length means 'attend everything'."""
        if self.tokens is not None:
            return self.tokens
        # Binary fractions fall just below: 0.29 of 100 is 29.
        return max(2, self.least, int((self.share or 1.0) * num_prompt_tokens + 1e-9))


class IndexDevice(enum.Enum):
    """Where indexes are trained: on the store's cores, on the model's device, or (auto) by the store what hides behind
    the prompt's computation and by a GPU the rest."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class HotCacheSize:
    """C, the slots of a recall sequence without sinks and window: a share of the prompt, a number, or (neither) auto.

    Auto is the whole context if that is at most half of what is free, else that half, so that the next request finds
    slots. Where sinks and window leave less than that half, it is what they leave.
    """

    share: float | None = None
    tokens: int | None = None

    @property
    def is_auto(self) -> bool:
        return self.share is None and self.tokens is None

    def num_slots(
        self, num_prompt_tokens: int, capacity: int, num_fixed_slots: int, num_free_slots: int
    ) -> int:
        """C in slots for each layer and head. capacity: tokens that the sequence may ever hold.

        num_fixed_slots: for sinks, window and the new token. num_free_slots: for all of them and C.
        """
        if self.tokens is not None:
            return self.tokens
        if self.share is not None:
            return math.ceil(self.share * num_prompt_tokens)
        return min(capacity, num_free_slots // 2, max(0, num_free_slots - num_fixed_slots))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, and what to tell of it. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and
    `min_p` 0 are off. `logprobs`: so many alternatives to each token, None: not even its own log probability;
    `prompt_logprobs`: the same of the prompt's tokens."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


class GrammarKind(enum.Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an answer must have: a text that is read as `kind` says.

    param: the field of the API that asked for it.
    """

    kind: GrammarKind
    text: str
    param: str


class Constraint(Protocol):
    """Holds one answer to a grammar, token by token. For one thread."""

    @property
    def is_ready(self) -> bool:
        """Return whether the result of `allowed` is there, or will be before a decode step is over."""

    @property
    def is_complete(self) -> bool:
        """Return whether the answer is complete: only its end may follow."""

    def take(self, token_id: int) -> None:
        """The answer goes on with this token, which is no end token. Raises RequestError where it cannot go on."""

    def allowed(self, vocab_size: int, end_token_ids: Collection[int]) -> npt.NDArray[np.int32]:
        """The tokens that may follow: [ceil(vocab_size / 32)], token t is bit t % 32 of word t // 32. End tokens are
        allowed where the answer may end, and nowhere else."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it. `num_prefill_tokens` 0 prefills all of the prompt (protocol P1).

    prefix_salt: requests of equal salt, and equal `cache_salt`, may share the KV of common prefixes, where
    `shares_prefix`.
    session_id: of the conversation; "" for none.
    weight: of the caller, relative to others.
    priority: the least is served first, and preempted last where memory runs out.
    policy_options: fields of the policy, and their texts.
    attention: AttentionEvents are emitted.
    constraint: of this answer alone; None: it may be anything.
    asked_at: when it came, by the monotonic clock.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    policy: str
    budget: Budget
    num_prefill_tokens: int = 0
    measure: bool = False
    prefix_salt: bytes = b""
    session_id: str = ""
    shares_prefix: bool = True
    weight: float = 1.0
    cache_salt: str = ""
    priority: int = 0
    policy_options: tuple[tuple[str, str], ...] = ()
    attention: bool = False
    constraint: Constraint | None = None
    asked_at: float = field(default_factory=time.monotonic, compare=False)
