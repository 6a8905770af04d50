"""The sampler's state of one request."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from gpu_worker.records import Constraint, SamplingParams
from gpu_worker.sampling.penalties import TokenCounts, has_penalties


class SamplerState:
    """A request's sampling parameters with what they need of its past.

    `default_seed` stands in for a missing `params.seed`, mixed with the request id so that requests differ;
    with neither, the seed is drawn from the system. Token n of a request depends on its seed, n and its
    logits only: batch mates and preemption change nothing.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        request_id: str,
        default_seed: int | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        """constraint: what the answer must be; None: anything."""
        self.params = params
        self.seed = _resolve_seed(params.seed, default_seed, request_id)
        self.constraint = constraint
        self.num_output_tokens = 0
        self.end_token_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self.counts = TokenCounts(prompt_token_ids, vocab_size) if has_penalties(params) else None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0.0

    @property
    def masks_end_tokens(self) -> bool:
        return self.num_output_tokens < self.params.min_tokens and bool(self.end_token_ids)

    @property
    def changes_logits(self) -> bool:
        """Return whether logits change, apart from what its constraint rules out."""
        return self.counts is not None or bool(self.params.logit_bias) or self.masks_end_tokens

    @property
    def is_free(self) -> bool:
        """Return whether logits, seed and its number alone determine the next token."""
        return self.constraint is None and self.counts is None and not self.masks_end_tokens

    @property
    def is_ready(self) -> bool:
        """Return whether a token can be chosen without others waiting for it."""
        return self.constraint is None or self.constraint.is_ready

    @property
    def is_complete(self) -> bool:
        """Return whether nothing may follow."""
        return self.constraint is not None and self.constraint.is_complete

    def append(self, token_id: int) -> None:
        """Count the token that the request goes on with; call once after each `sample`. Raises RequestError where its
        constraint cannot go on."""
        self.num_output_tokens += 1
        if self.counts is not None:
            self.counts.append(token_id)
        if self.constraint is not None and token_id not in self.end_token_ids:
            self.constraint.take(token_id)


def _resolve_seed(seed: int | None, default_seed: int | None, request_id: str) -> int:
    if seed is not None:
        return seed % 2**64
    if default_seed is None:
        return secrets.randbits(64)
    digest = hashlib.blake2b(f"{default_seed}:{request_id}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
