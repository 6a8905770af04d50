"""Requests that arrive at random, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from benchmarks.cluster_model.parameters import ClusterParameters, Mix, RequestKind


@dataclass(slots=True)
class Request:
    """One request on its way. prefix: the number of what it repeats, of which `prefix_tokens` are its prompt's; or -1.

    Times are seconds since the start: `routed` from the gateway to a replica, `ready` there,
    `admitted` to prefill, `first_token`, `finished`; -1: not yet. has_prefix: the replica has the rows of the prefix,
    known when it is admitted.
    """

    number: int
    kind: RequestKind
    arrival: float
    prefix: int = -1
    prefix_tokens: int = 0
    replica: int = -1
    routed: float = -1.0
    ready: float = -1.0
    admitted: float = -1.0
    first_token: float = -1.0
    finished: float = -1.0
    has_prefix: bool = False

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return self.kind.prompt_tokens + self.kind.output_tokens

    @property
    def known_tokens(self) -> int:
        """Of the prompt, not to be computed."""
        return self.prefix_tokens if self.has_prefix else 0

    @property
    def mean_context(self) -> float:
        """While it decodes."""
        return self.kind.prompt_tokens + self.kind.output_tokens / 2


@dataclass(frozen=True)
class Prefix:
    """Something that requests come back to."""

    number: int
    num_tokens: int


def prefixes_of(mix: Mix, parameters: ClusterParameters, num_gpus: int) -> list[list[Prefix]]:
    """Of each kind; none of a kind that never comes."""
    found: list[list[Prefix]] = []
    number = 0
    for kind, share in zip(mix.kinds, mix.shares, strict=True):
        count = parameters.num_prefixes(share, num_gpus) if share else 0
        found.append([Prefix(number + index, parameters.prefix_tokens(kind)) for index in range(count)])
        number += count
    return found


def arrivals(mix: Mix, prefixes: list[list[Prefix]], rate: float, count: int, seed: int) -> Iterator[Request]:
    """`count` requests, `rate` a second. Another rate changes their times only."""
    rng = Random(seed)
    kinds, bounds = mix.kinds, list(accumulate(mix.shares))
    now = 0.0
    for number in range(count):
        now += rng.expovariate(1.0) / rate
        drawn = rng.random() * bounds[-1]
        kind = next((index for index, bound in enumerate(bounds) if drawn < bound), len(bounds) - 1)
        repeats, place = rng.random() < mix.repeated, rng.random()
        request = Request(number, kinds[kind], now)
        if repeats and prefixes[kind]:
            prefix = prefixes[kind][int(place * len(prefixes[kind]))]
            request.prefix, request.prefix_tokens = prefix.number, prefix.num_tokens
        yield request
