"""The next token of every request of a batch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.device import Mark, to_device, to_host
from gpu_worker.kernels.keep_allowed import keep_allowed
from gpu_worker.records import TokenEvent
from gpu_worker.sampling.filters import first_k, keep_min_p, keep_top_k, keep_top_p
from gpu_worker.sampling.penalties import apply_penalties
from gpu_worker.sampling.state import SamplerState

WEIGHT_SCALE = 2.0**40

# The exponent of a float32: all set in NaN and in the infinities only.
INFINITE_BITS = 0x7F800000

Filter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# by row, as a constraint gives them
Masks = Mapping[int, npt.NDArray[np.int32]]


class Sampler:
    """Chooses one token for each request; requests of one batch may differ in every parameter.

    The order is: mask of the constraint, penalties, logit bias, mask of the end tokens below min_tokens, then greedy,
    or temperature, top-k, top-p (of what top-k left), min-p and a draw. Log-probabilities are those of the raw logits.
    Holds no state: the same states and logits give the same tokens.
    """

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, states: Sequence[SamplerState]) -> list[TokenEvent | None]:
        """Choose from logits [B, V] float32 for B states, which stay as they are (`append` is the caller's); so do the
        logits but those that a constraint rules out, which become -inf.

        None for a row that holds NaN, +inf or nothing finite.
        """
        return self.begin(logits, states).take()

    @torch.inference_mode()
    def begin(self, logits: torch.Tensor, states: Sequence[SamplerState], num_coming: int = 0) -> Choice:
        """`sample`, queued on the device: the host goes on, and work queued behind it runs while the host takes the
        tokens. num_coming: tokens of each that are drawn before these and that its state does not have yet; then
        nothing of a state but its seed and its number of tokens may depend on them."""
        masks = _allowed(states, logits.shape[-1])
        num_tops = {
            row: state.params.logprobs
            for row, state in enumerate(states)
            if state.params.logprobs is not None
        }
        raw = logits.clone() if masks and num_tops else logits
        if masks:
            _constrain(logits, masks)
        greatest, token_ids = logits.max(dim=-1)
        rows = [row for row, state in enumerate(states) if state.changes_logits or not state.is_greedy]
        if rows:
            index = _index(rows, logits)
            chosen = _choose(logits[index], [states[row] for row in rows], num_coming)
            token_ids.index_copy_(0, index, chosen)
        # One transfer to the host for both, with few launches: as int64 the bits of a float32 stay as they are.
        both = to_host(torch.cat([token_ids, greatest.view(torch.int32)]))
        return Choice(token_ids, both, _begin_logprobs(raw, token_ids, num_tops))


class Choice:
    """Chosen tokens on their way to the host. token_ids: int64 [B], where they come from."""

    def __init__(self, token_ids: torch.Tensor, both: torch.Tensor, logprobs: _Logprobs | None) -> None:
        """both: int64 [2 B], token ids and the bits of each row's greatest logit. Made once all is queued."""
        self.token_ids = token_ids
        self._both = both
        self._logprobs = logprobs
        self._copied = Mark(token_ids.device)

    @property
    def is_reached(self) -> bool:
        """Return whether the tokens have arrived on the host."""
        return self._copied.is_reached

    def wait(self) -> None:
        """Let the host wait until they are there."""
        self._copied.wait()

    def take(self) -> list[TokenEvent | None]:
        """Wait for them; as `sample` returns them."""
        self.wait()
        ids, bits = self._both.view(2, -1).tolist()
        events = [
            TokenEvent(token_id) if one & INFINITE_BITS != INFINITE_BITS else None
            for token_id, one in zip(ids, bits, strict=True)
        ]
        if self._logprobs is not None:
            self._logprobs.add_to(events)
        return events


def _allowed(states: Sequence[SamplerState], vocab_size: int) -> Masks:
    return {
        row: state.constraint.allowed(vocab_size, state.end_token_ids)
        for row, state in enumerate(states)
        if state.constraint is not None
    }


def _constrain(logits: torch.Tensor, masks: Masks) -> None:
    rows = np.array([*masks], np.int32)[:, None]
    # One transfer for both.
    packed = to_device(np.hstack([rows, np.stack([*masks.values()])]), logits.device)
    keep_allowed(logits, packed[:, 0], packed[:, 1:])


def _choose(logits: torch.Tensor, states: list[SamplerState], num_coming: int) -> torch.Tensor:
    """Token ids [B] from rows that may be overwritten."""
    for row, state in zip(logits, states, strict=True):
        _adjust(row, state)
    token_ids = logits.argmax(dim=-1)
    random = [row for row, state in enumerate(states) if not state.is_greedy]
    if not random:
        return token_ids
    index = _index(random, logits)
    return token_ids.index_copy_(0, index, _draw(logits[index], [states[row] for row in random], num_coming))


def _adjust(row: torch.Tensor, state: SamplerState) -> None:
    if state.counts is not None:
        apply_penalties(row, state.params, state.counts)
    if state.params.logit_bias:
        token_ids, biases = zip(*state.params.logit_bias, strict=True)
        row.index_add_(0, _index(token_ids, row), to_device(np.array(biases, np.float32), row.device))
    if state.masks_end_tokens:
        # finite: should a request mask all of the vocabulary, it still gets a token
        row.index_fill_(0, _index(sorted(state.end_token_ids), row), torch.finfo(row.dtype).min)


def _draw(logits: torch.Tensor, states: list[SamplerState], num_coming: int) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    params = [state.params for state in states]
    temperatures = to_device(np.array([p.temperature for p in params], np.float32), logits.device)
    # greatest to 0 first: a tiny temperature then cannot overflow
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures.unsqueeze(-1)
    top_k = {row: p.top_k for row, p in enumerate(params) if 0 < p.top_k < vocab_size}
    most = max(top_k.values(), default=1)
    logits = _filter_rows(logits, partial(keep_top_k, most=most), top_k, np.int64)
    top_p = {row: p.top_p for row, p in enumerate(params) if p.top_p < 1.0}
    logits = _filter_rows(logits, keep_top_p, top_p, np.float32)
    min_p = {row: p.min_p for row, p in enumerate(params) if p.min_p > 0.0}
    logits = _filter_rows(logits, keep_min_p, min_p, np.float32)
    uniforms = [uniform(state.seed, state.num_output_tokens + num_coming) for state in states]
    return draw(logits, to_device(np.array(uniforms), logits.device))


def _filter_rows(
    logits: torch.Tensor, keep: Filter, values: Mapping[int, float], dtype: npt.DTypeLike
) -> torch.Tensor:
    """Apply a filter to the rows that ask for it: `values` maps row to parameter."""
    if not values:
        return logits
    parameters = to_device(np.array(list(values.values()), dtype), logits.device)
    if len(values) == len(logits):
        return keep(logits, parameters)
    index = _index(list(values), logits)
    return logits.index_copy(0, index, keep(logits[index], parameters))


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """On their way to the host. num_tops: how many each row that asked wants. logprobs: [B, 1 + k] float32, of its
    token and of its k likeliest, whose ids are `top_ids` [B, k]."""

    num_tops: dict[int, int]
    logprobs: torch.Tensor
    top_ids: torch.Tensor

    def add_to(self, events: list[TokenEvent | None]) -> None:
        """Only once they are on the host."""
        of_rows = zip(self.num_tops.items(), self.logprobs.tolist(), self.top_ids.tolist(), strict=True)
        for (row, num_top), (logprob, *tops), top_ids in of_rows:
            if (event := events[row]) is not None:
                top = tuple(zip(top_ids, tops, strict=True))
                events[row] = TokenEvent(event.token_id, logprob, top[:num_top])


def _begin_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_tops: dict[int, int]
) -> _Logprobs | None:
    if not num_tops:
        return None
    index = _index(list(num_tops), logits)
    logits = logits[index]
    # Ties fall to the smaller token id.
    top_ids = first_k(logits, min(max(num_tops.values()), logits.shape[-1]))
    wanted = torch.cat([token_ids[index].unsqueeze(-1), top_ids], dim=-1)
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, wanted)
    return _Logprobs(num_tops, to_host(logprobs), to_host(top_ids))


def _index(rows: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return to_device(np.array(rows, np.int64), like.device)


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same seed and counter (both uint64)."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, counter), digest_size=8, person=b"carrel.sample")
    return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token of each row's softmax by inverting its distribution function.

    The sums are exact, as weights are whole multiples of 2**-40 of the row's greatest, so that the token does
    not depend on the order of summation. Tokens less likely than that against the likeliest are never drawn.

    Args:
        logits: [B, V] float32; -inf removes a token; the greatest of a row is finite.
        uniforms: [B] float64 in [0, 1).

    Returns:
        [B] int64 token ids.
    """
    relative = torch.exp((logits - logits.amax(dim=-1, keepdim=True)).double())
    bounds = (relative * WEIGHT_SCALE).long().cumsum(dim=-1)
    total = bounds[:, -1]
    targets = torch.minimum((uniforms * total.double()).long(), total - 1)
    return torch.searchsorted(bounds, targets.unsqueeze(-1), right=True).squeeze(-1)
