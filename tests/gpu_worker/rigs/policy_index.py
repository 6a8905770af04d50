"""Indexes and segments on tiny shapes, for the tests of the policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_worker.policies.base import CacheShape, Plan, StepQueries
from gpu_worker.policies.recall import Candidates, Leaving, PrefilledLayer, RecallPolicy
from kv_store.client import RowFormat

SHAPE = CacheShape(
    max_num_seqs=3,
    num_layers=2,
    num_kv_heads=2,
    group_size=2,
    row_format=RowFormat(8, "fp32"),
    max_model_len=512,
    scale=0.35,
    device=torch.device("cpu"),
)


def poison(index: object) -> None:
    """Fill an index with what a CUDA allocation may hold."""
    for name in index.__slots__:  # type: ignore[attr-defined]
        tensor = getattr(index, name)
        if not isinstance(tensor, Tensor):
            continue
        tensor.fill_(float("nan") if tensor.is_floating_point() else 113)


def pq_segment(codebooks: Tensor, codes: Tensor) -> dict[str, Tensor]:
    return {"codebooks": codebooks, "codes": codes}


def kmeans_segment(centroids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"centroids": centroids, "labels": labels.int()}


def candidates_of(query: Tensor, spans: dict[int, tuple[int, int]], layer: int, extra: int = 0) -> Candidates:
    """Return the candidates of seats with these spans.

    query: [B, H_q, d], the early one too. extra: positions beyond the largest end.
    """
    begin, end = torch.tensor(list(spans.values())).T
    seats, num_positions = torch.tensor(list(spans)), int(end.max()) + extra
    return Candidates(layer, queries_of(query), seats, begin, end, num_positions, SHAPE.scale)


def queries_of(own: Tensor, early: Tensor | None = None) -> StepQueries:
    """Return the queries of one layer; the early ones are the same if not given."""
    return StepQueries(own, lambda: own if early is None else early)


def select(
    policy: RecallPolicy, index: object, query: Tensor, spans: dict[int, tuple[int, int]], layer: int, k: int
) -> list[list[list[int]]]:
    """The k positions that each seat's heads select. spans: seat to its candidates; query: [B, H_q, d]."""
    candidates = candidates_of(query, spans, layer)
    return policy.select(index, candidates, torch.full((len(spans),), k), k).tolist()


def new_index(policy: RecallPolicy, shape: CacheShape = SHAPE) -> Any:
    index = policy.allocate(shape)
    poison(index)
    return index


@dataclass(frozen=True, slots=True)
class Tokens:
    """keys: [L, H_kv, n, d]. queries: [L, H_q, n, d]."""

    keys: Tensor
    queries: Tensor

    @classmethod
    def random(cls, num_tokens: int, seed: int, shape: CacheShape = SHAPE) -> Tokens:
        generator = torch.Generator().manual_seed(seed)
        row = (num_tokens, shape.head_dim)
        keys = torch.randn(shape.num_layers, shape.num_kv_heads, *row, generator=generator)
        num_heads = shape.num_kv_heads * shape.group_size
        return cls(keys, torch.randn(shape.num_layers, num_heads, *row, generator=generator))


def grow(policy: RecallPolicy, index: object, seat: int, tokens: Tokens, plan: Plan) -> tuple[int, int]:
    """Prefill the plan's prompt, then decode through the other tokens. Returns the candidates, begin and end."""
    num_prompt, width = plan.num_prompt_tokens, policy.num_queries(plan)
    layers = range(tokens.keys.shape[0])
    for layer in layers:
        keys, queries = tokens.keys[layer, :, :num_prompt], tokens.queries[layer, :, :num_prompt]
        prefilled = PrefilledLayer(seat, layer, plan, keys, keys, queries[:, num_prompt - width :])
        policy.observe_prefill(index, prefilled)
    begin = policy.window_begin(plan, num_prompt)
    for num_tokens in range(num_prompt + 1, tokens.keys.shape[2] + 1):
        end = policy.window_begin(plan, num_tokens)
        if end > begin:
            leave(policy, index, seat, layers, begin, tokens.keys[:, :, begin])
        begin = end
    return plan.num_sink, begin


def leave(policy: RecallPolicy, index: object, seat: int, layers: range, position: int, keys: Tensor) -> None:
    """Let one token, keys [L, H_kv, d], leave the window, between two rows of padding that share a seat."""
    other = (seat + 1) % SHAPE.max_num_seqs
    nothing = torch.full_like(keys, float("nan"))
    seats, positions = torch.tensor([other, seat, other]), torch.tensor([-1, position, -1])
    policy.extend(index, Leaving(seats, layers, positions, lambda: torch.stack([nothing, keys, nothing])))


def check_seats_apart(policy: RecallPolicy, num_tokens: int, budget: int, k: int) -> None:
    """Whatever other seats hold and held, a seat selects what it would alone, and padding writes nothing."""
    spans, alone = {}, []
    shared = new_index(policy)
    # Seat 2 had a longer request before.
    long = Tokens.random(num_tokens + 90, 9)
    grow(policy, shared, 2, long, policy.plan(num_tokens + 70, budget))
    query = torch.randn(2, 4, SHAPE.head_dim, generator=torch.Generator().manual_seed(1))
    # While seat 2 decodes, padding has seat 0.
    for row, (seat, length) in enumerate({0: num_tokens - 21, 2: num_tokens}.items()):
        tokens, plan = Tokens.random(length + 20, seat), policy.plan(length, budget)
        spans[seat] = grow(policy, shared, seat, tokens, plan)
        own = new_index(policy)
        assert grow(policy, own, seat, tokens, plan) == spans[seat]
        alone.append(select(policy, own, query[row : row + 1], {seat: spans[seat]}, layer=1, k=k)[0])
    assert select(policy, shared, query, spans, layer=1, k=k) == alone
    first = new_index(policy)
    grow(policy, first, 0, Tokens.random(num_tokens - 1, 0), policy.plan(num_tokens - 21, budget))
    for name in shared.__slots__:
        tensor = getattr(shared, name)
        if isinstance(tensor, Tensor):
            assert torch.equal(tensor[:2].nan_to_num(7), getattr(first, name)[:2].nan_to_num(7))
