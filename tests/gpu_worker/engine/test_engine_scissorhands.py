"""Scissorhands through the engine keeps what a loop over lists keeps, which notes every query."""

from __future__ import annotations

import pytest
import torch
from engine_rig import HEAD_DIM, NUM_KV_HEADS, Rig, make_model, random_prompt, request, small_policies
from naive_decoder import greedy
from torch import Tensor

from gpu_worker.kernels.prefill_attention import attend_chunk_naive
from gpu_worker.models import LoadedModel
from gpu_worker.policies.scissorhands.policy import Scissorhands

PROMPT, STEPS = 120, 60


@torch.inference_mode()
def prompt_rows(model: LoadedModel, prompt: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Queries [H_kv, group, n, d] and keys [H_kv, n, d] of every layer."""
    decoder, config, found = model.decoder, model.config, []
    hidden = decoder.embed(torch.tensor(prompt))
    for layer in range(config.num_layers):
        query, key, value = decoder.project_qkv(layer, hidden, torch.arange(len(prompt)))
        rows = torch.cat([key, value], dim=-1).transpose(0, 1)
        found.append((query.transpose(0, 1).unflatten(0, (NUM_KV_HEADS, -1)), key.transpose(0, 1)))
        attention = attend_chunk_naive(query, rows, 0, decoder.attention_scale)
        hidden = decoder.finish_layer(layer, hidden, attention)
    return found


def passed_over(queries: Tensor, keys: Tensor) -> list[bool]:
    """Return for each key whether a query, [group, d], gives it less than the average."""
    weights = (queries @ keys.T * HEAD_DIM**-0.5).softmax(-1).mean(0)
    return (weights < 1 / len(keys)).tolist()


class Notes:
    """One head of one layer: the queries that passed over each token that is kept."""

    def __init__(self, policy: Scissorhands, budget: int, queries: Tensor, keys: Tensor) -> None:
        self.window_size, self.budget, self.since = policy.window_size, budget, 0
        self.num_recent = policy.plan(PROMPT, budget).num_recent
        self.queries: dict[int, list[int]] = {position: [] for position in range(PROMPT)}
        for query in range(PROMPT - self.window_size, PROMPT):
            self.note(query, queries[:, query], keys[: query + 1])
        self.keep(PROMPT, budget)

    def note(self, query: int, queries: Tensor, keys: Tensor) -> None:
        for position, is_passed in zip(sorted(self.queries), passed_over(queries, keys), strict=False):
            if is_passed:
                self.queries[position].append(query)

    def keep(self, num_tokens: int, count: int) -> None:
        def counter(position: int) -> int:
            return sum(query >= num_tokens - self.window_size for query in self.queries[position])

        recent = num_tokens - self.num_recent
        best = sorted(self.queries, key=lambda one: (one < recent, counter(one), -one))[:count]
        self.queries, self.since = {position: self.queries[position] for position in sorted(best)}, 0

    def step(self, queries: Tensor, keys: Tensor) -> list[int]:
        new = len(keys) - 1
        if self.since == self.budget // 2:
            self.keep(new, self.budget - self.budget // 2)
        self.queries[new] = []
        self.note(new, queries, keys[sorted(self.queries)])
        self.since += 1
        return sorted(self.queries)


@pytest.mark.parametrize(
    ("budget", "recent_ratio", "window_size", "group"),
    # A window shorter than what is decoded between two calls, as long, longer, and of many calls.
    [
        (24, 0.0, 5, 3),
        (24, 0.1, 12, 1),
        (25, 0.0, 30, 4),
        (24, 0.0, 50, 3),
        (13, 0.05, 8, 4),
        (5, 0.1, 21, 1),
    ],
)
def test_the_counters_are_of_the_last_queries_exactly(
    budget: int, recent_ratio: float, window_size: int, group: int
) -> None:
    model, prompt = make_model(group=group), random_prompt(PROMPT)
    policy = Scissorhands(window_size, recent_ratio)
    notes: dict[tuple[int, int], Notes] = {}
    for layer, (queries, keys) in enumerate(prompt_rows(model, prompt)):
        for head in range(NUM_KV_HEADS):
            notes[layer, head] = Notes(policy, budget, queries[head], keys[head])

    def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
        return notes[layer, kv_head].step(queries, keys)

    rig = Rig(model, policies={**small_policies(), policy.name: policy})
    found = rig.tokens(request("one", "scissorhands", budget, max_tokens=STEPS))
    assert found == greedy(model, prompt, STEPS, attended)[0]
    rig.check_empty()
