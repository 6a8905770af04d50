"""InfLLM's sparse prefill, against a loop over queries that says of each what it attends."""

from __future__ import annotations

import pytest
import torch
from policy_index import SHAPE
from torch import Tensor

from gpu_worker.kernels.prefill_attention import attend_chunk_naive
from gpu_worker.policies.base import Plan
from gpu_worker.policies.infllm.policy import InfLLM

SIZE, CHUNK, SCALE = 4, 8, SHAPE.scale
HEADS, DIM = 2, 8
# 3 sinks, a window of 5, two blocks.
PLAN = Plan(100, 16, num_sink=3, num_recent=5, num_selected=8)


def policy(per_head: bool = False) -> InfLLM:
    return InfLLM(SIZE, 2, 3, per_head=per_head, sparse_prefill=True, chunk_size=CHUNK)


def prompt(num_tokens: int, group: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Queries [n, H_q, d] and rows [H_kv, n, 2d]."""
    generator = torch.Generator().manual_seed(seed)
    queries = 2 * torch.randn(num_tokens, group * HEADS, DIM, generator=generator)
    return queries, torch.randn(HEADS, num_tokens, 2 * DIM, generator=generator)


def attend(one: InfLLM, queries: Tensor, rows: Tensor, ends: list[int], plan: Plan = PLAN) -> Tensor:
    """As the engine asks: quanta that end here."""
    sparse = one.prompt_attention(plan)
    assert sparse is not None
    parts = []
    for begin, end in zip([0, *ends], [*ends, len(queries)], strict=True):
        # What is not computed yet is no one's to read.
        there = torch.full_like(rows, float("nan"))
        there[:, :end] = rows[:, :end]
        parts.append(sparse.attend(queries[begin:end], there, begin, SCALE))
    return torch.cat(parts)


def attended(queries: Tensor, rows: Tensor, per_head: bool) -> list[list[set[int]]]:
    """Mark what each query of each KV head sees, less what comes after it."""
    num_tokens, group = len(queries), queries.shape[1] // HEADS
    received = torch.zeros(HEADS, num_tokens, dtype=torch.float64)
    keys, seen = rows[..., :DIM].double(), []
    asking = queries.double()
    for begin in range(0, num_tokens, CHUNK):
        end = min(begin + CHUNK, num_tokens)
        # The first block has sinks, and is always there.
        blocks = range(1, max(1, (begin - 4) // SIZE))
        scores = torch.zeros(HEADS, len(blocks), dtype=torch.float64)
        for head in range(HEADS):
            mean = asking[begin:end, head * group : (head + 1) * group].mean((0, 1))
            for place, block in enumerate(blocks):
                tokens = range(block * SIZE, (block + 1) * SIZE)
                best = sorted(tokens, key=lambda token: -float(received[head, token]))[:2]
                scores[head, place] = keys[head, best].mean(0) @ mean
        if not per_head:
            scores = scores.mean(0).expand(HEADS, -1)
        near = set(range(blocks.stop * SIZE, end)) | set(range(SIZE))
        chosen = []
        for head in range(HEADS):
            best = scores[head].argsort(descending=True)[:2].tolist()
            chosen.append(
                near
                | {token for one in best for token in range(blocks[one] * SIZE, blocks[one] * SIZE + SIZE)}
            )
        for query in range(begin, end):
            seen.append([{token for token in head if token <= query} for head in chosen])
            window = [*range(min(3, query + 1)), *range(max(3, query - 4), query + 1)]
            for head in range(group * HEADS):
                weights = (keys[head // group, window] @ queries[query, head].double() * SCALE).softmax(0)
                received[head // group, window] += weights
    return seen


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("num_tokens", [61, 64])
def test_queries_attend_sinks_the_best_blocks_and_what_is_near(
    num_tokens: int, group: int, per_head: bool
) -> None:
    queries, rows = prompt(num_tokens, group)
    found = attend(policy(per_head), queries, rows, [])
    for query, heads in enumerate(attended(queries, rows, per_head)):
        for head, seen in enumerate(heads):
            positions = torch.tensor(sorted(seen))
            taken = rows[head, positions].double()
            one = queries[query, head * group : (head + 1) * group].double()
            expected = (one @ taken[:, :DIM].T * SCALE).softmax(-1) @ taken[:, DIM:]
            torch.testing.assert_close(
                found[query, head * group : (head + 1) * group].double(), expected, atol=1e-5, rtol=1e-4
            )
    dense = attend_chunk_naive(queries, rows, 0, SCALE)
    assert torch.allclose(found[:20], dense[:20], atol=1e-5)
    assert not torch.allclose(found[40:], dense[40:], atol=1e-2)


@pytest.mark.parametrize("ends", [[8, 16, 48], [24], [32, 40]])
def test_quanta_of_whole_chunks_change_nothing(ends: list[int]) -> None:
    queries, rows = prompt(64, 2)
    torch.testing.assert_close(
        attend(policy(), queries, rows, ends), attend(policy(), queries, rows, []), atol=1e-6, rtol=1e-5
    )


def test_where_there_are_no_more_blocks_than_are_selected_the_prompt_is_dense() -> None:
    queries, rows = prompt(30, 2)
    many = Plan(100, 40, num_sink=3, num_recent=5, num_selected=32)
    found = attend(policy(), queries, rows, [], many)
    torch.testing.assert_close(found, attend_chunk_naive(queries, rows, 0, SCALE), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("per_head", [False, True])
def test_of_blocks_that_score_alike_the_later_are_attended(per_head: bool) -> None:
    queries, rows = prompt(64, 2)
    queries = torch.zeros_like(queries)
    found = attend(policy(per_head), queries, rows, [])
    for begin in range(0, 64, CHUNK):
        # Of the blocks before the first query's window two, and all from there on.
        near = max(SIZE, (begin - 4) // SIZE * SIZE)
        for query in range(begin, begin + CHUNK):
            positions = [*range(SIZE), *range(max(SIZE, near - 2 * SIZE), query + 1)]
            mean = rows[:, positions[: query + 1], DIM:].mean(dim=1)
            torch.testing.assert_close(
                found[query], mean.repeat_interleave(2, dim=0).view_as(found[query]), atol=1e-5, rtol=1e-4
            )
