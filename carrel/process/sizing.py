"""Plans of one model for GPUs of several sizes: records that the worker's package computes and `carrel plan` shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """Requests of one length that a card holds at once; 0 where one of that length does not fit.

    num_tokens: prompt and answer together.
    dense: with every token on the device, under the policy `full`.
    selecting: under the default policy, with as few slots as it needs; None where that is dense too.
    """

    num_tokens: int
    dense: int
    selecting: int | None


@dataclass(frozen=True, slots=True)
class Card:
    """A worker on a GPU of `num_bytes`.

    longest: the longest context with which it starts, in tokens; 0 where it does not start with any.
    missing_bytes: device memory that is missing for a short context; 0 where the worker starts.
    seats: requests that are decoded at once.
    kv_tokens: tokens with their keys and values on the device, of all requests together.
    """

    num_bytes: int
    longest: int
    missing_bytes: int = 0
    seats: int = 0
    kv_tokens: int = 0
    held: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class Sizing:
    """The cards for one model and the options of one worker.

    dtype: a name of torch's, such as `bfloat16`.
    token_bytes: keys and values of one token in all layers.
    policy, budget: of requests that name none; the budget in words.
    recalls: whether requests of that policy have their caches in host memory.
    host_bytes: host memory for these caches; None: no limit.
    """

    dtype: str
    num_parameters: int
    weight_bytes: int
    token_bytes: int
    max_model_len: int
    policy: str
    budget: str
    recalls: bool
    host_bytes: int | None
    cards: tuple[Card, ...]
