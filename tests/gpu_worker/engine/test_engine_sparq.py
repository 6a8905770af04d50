"""SparQ through the engine: its mean value is that of a naive decoder which has all rows at hand."""

from __future__ import annotations

import pytest
from engine_rig import HEAD_DIM, Rig, make_model, random_prompt, request, small_policies
from naive_decoder import first_best, greedy
from torch import Tensor

from gpu_worker.caches import HotCacheSize
from gpu_worker.policies.base import Policy
from gpu_worker.policies.sparq.policy import SparQ
from gpu_worker.state.batch import Buckets

PROMPT, BUDGET, STEPS, CHANNELS = 120, 30, 50, 3


def policies() -> dict[str, Policy]:
    both = [SparQ(num_channels=CHANNELS, num_sink=4, mean_value=on) for on in (False, True)]
    return {**small_policies(), **{policy.name: policy for policy in both}}


def approximate(queries: Tensor, keys: Tensor) -> Tensor:
    """Scores of one group's queries [G, d] by their largest channels: [G, T]."""
    used = queries.abs().sum(0).sort(descending=True, stable=True).indices[:CHANNELS]
    share = queries[:, used].abs().sum(1) / queries.abs().sum(1)
    return queries[:, used] @ keys[:, used].T / (HEAD_DIM * share[:, None]).sqrt()


def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
    # 30 tokens: 4 sinks, half of the other 26 recent, half by weight.
    end = len(keys) - 1 - 13
    weights = approximate(queries, keys[4:end]).softmax(-1).sum(0)
    return [*range(4), *first_best(weights, 13, 4), *range(end, len(keys))]


def with_mean(queries: Tensor, past: Tensor, positions: list[int], attention: Tensor) -> Tensor:
    weights = approximate(queries, past[:, :HEAD_DIM]).softmax(-1)
    kept = weights[:, positions].sum(1, keepdim=True)
    return kept * attention + (1 - kept) * past[:, HEAD_DIM:].mean(0)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return greedy(make_model(), random_prompt(PROMPT), STEPS, attended, with_mean)[0]


@pytest.mark.parametrize("hot_cache", [HotCacheSize(), HotCacheSize(tokens=1)])
def test_what_is_not_attended_counts_as_the_mean_value(hot_cache: HotCacheSize, expected: list[int]) -> None:
    rig = Rig(policies=policies(), hot_cache=hot_cache, tokens_per_slab=256)
    plain, mixed = rig.run(
        request("plain", "sparq", BUDGET, max_tokens=STEPS),
        request("mixed", "sparq+mean", BUDGET, max_tokens=STEPS),
    )
    assert plain.tokens == greedy(make_model(), random_prompt(PROMPT), STEPS, attended)[0]
    assert mixed.tokens == expected != plain.tokens
    assert mixed.usage.attended_tokens == BUDGET
    rig.check_empty()


def test_the_mean_is_of_this_request_alone(expected: list[int]) -> None:
    """A seat that another had before, beside others, with padding in between."""
    rig = Rig(policies=policies(), max_num_seqs=4)
    # As on a GPU: three sequences in four rows.
    rig.engine.caches.buckets = Buckets(is_exact=False)
    rig.run(request("before", "sparq+mean", BUDGET, prompt=200, max_tokens=20))
    records = rig.run(
        request("short", "sparq+mean", BUDGET, prompt=60, max_tokens=9),
        request("one", "sparq+mean", BUDGET, max_tokens=STEPS),
        request("late", "sparq+mean", BUDGET, prompt=90, num_prefill=80, max_tokens=15),
    )
    assert records[1].tokens == expected
    alone = Rig(policies=policies())
    assert records[0].tokens == alone.tokens(request("short", "sparq+mean", BUDGET, prompt=60, max_tokens=9))
    rig.check_empty()


def test_only_the_form_with_the_mean_bears_its_name() -> None:
    assert (SparQ().name, SparQ(mean_value=True).name) == ("sparq", "sparq+mean")
