"""Chelsea: near duplicates of a chunk become one row, which attention counts as many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu_worker.kernels.rope import rope
from gpu_worker.layers.rope import RopeSpec, rope_table
from gpu_worker.policies.base import Plan
from gpu_worker.policies.chelsea.policy import Chelsea
from gpu_worker.policies.chelsea.soft_matching import match_rows
from gpu_worker.policies.retain import LayerRows, Recompression, Retained

DIM = 16
POLICY = Chelsea(num_sink=2, num_recent=4, chunk=8)


def plan_of(num_tokens: int, budget: int, num_sink: int = 2, num_recent: int = 4) -> Plan:
    return Plan(num_tokens, budget, num_sink, num_recent, budget - num_sink - num_recent)


def rows_of(keys: Tensor, values: Tensor | None = None, group_size: int = 1) -> LayerRows:
    values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(9)) if values is None else values
    queries = keys.new_empty(group_size * len(keys), 0, keys.shape[2])
    return LayerRows.of_prompt(0, 1, torch.cat([keys, values], dim=-1), queries, 0.25)


def random_keys(num_heads: int, num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_heads, num_tokens, DIM, generator=torch.Generator().manual_seed(seed))


def attend(queries: Tensor, keys: Tensor, values: Tensor, degrees: Tensor) -> Tensor:
    scores = queries @ keys.transpose(1, 2) * 0.25 + degrees.log()[:, None]
    return scores.softmax(dim=-1) @ values


def degrees_of(rows: LayerRows | Retained) -> Tensor:
    """How many tokens each row stands for: whole numbers, whose logarithms are the notes."""
    degrees = rows.notes.exp()
    torch.testing.assert_close(degrees, degrees.round())
    return degrees.round()


def again(retained: Retained, rows: LayerRows, num_new: int, seed: int = 5) -> LayerRows:
    """Return the rows that `compress` gets once so many more tokens are decoded."""
    heads, _, dim = retained.keys.shape
    new = torch.randn(2, heads, num_new, dim, generator=torch.Generator().manual_seed(seed))
    positions = rows.num_tokens + torch.arange(num_new).expand(heads, -1)
    return replace(
        rows,
        num_tokens=rows.num_tokens + num_new,
        keys=torch.cat([retained.keys, new[0]], dim=1),
        values=torch.cat([retained.values, new[1]], dim=1),
        positions=torch.cat([retained.positions, positions], dim=1),
        notes=torch.cat([retained.notes, torch.zeros(heads, num_new)], dim=1),
        rounds=retained.rounds,
    )


def test_duplicates_merge_into_the_even_row_and_others_stay() -> None:
    keys = random_keys(2, 14)
    # Head 0: rows 2 and 4 of the prompt are like row 5; head 1: row 8 is like row 3.
    keys[0, [2, 4]] = keys[0, 5] * torch.tensor([[2.0], [0.5]])
    keys[1, 8] = keys[1, 3] * 3
    rows = rows_of(keys)
    # The middle is 2..9, one chunk; a quarter of 8 rows goes in the first round.
    retained = Chelsea(2, 4, 8, r_init=0.25).compress(rows, plan_of(14, 12), 12)
    assert retained.positions[0].tolist() == [0, 1, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert degrees_of(retained)[0].tolist() == [1, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1]
    torch.testing.assert_close(retained.keys[0, 3], keys[0, [2, 4, 5]].mean(0))
    torch.testing.assert_close(retained.values[0, 3], rows.values[0, [2, 4, 5]].mean(0))
    assert 8 not in retained.positions[1]
    at_3 = retained.positions[1].tolist().index(3)
    torch.testing.assert_close(retained.keys[1, at_3], keys[1, [3, 8]].mean(0))
    alone = degrees_of(retained) == 1
    for head in range(2):
        kept = retained.positions[head][alone[head]]
        assert torch.equal(retained.keys[head][alone[head]], keys[head, kept])
        assert torch.equal(retained.values[head][alone[head]], rows.values[head, kept])


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "budget"), [(40, 39), (40, 7), (61, 20), (100, 12), (257, 65), (500, 31)]
)
def test_the_budget_is_met_exactly_and_every_token_is_counted(
    num_tokens: int, budget: int, chunked: bool
) -> None:
    policy = replace(POLICY, chunked=chunked)
    rows = rows_of(random_keys(3, num_tokens), group_size=4)
    retained = policy.compress(rows, plan_of(num_tokens, budget), budget)
    assert retained.positions.shape == degrees_of(retained).shape == (3, budget)
    assert retained.keys.shape == retained.values.shape == (3, budget, DIM)
    assert retained.counts.tolist() == [budget] * 3
    assert (retained.positions.diff(dim=1) > 0).all()
    assert degrees_of(retained).sum(dim=1).tolist() == [num_tokens] * 3
    # Weighted by degrees, the mean of all is what it was.
    for kept, given in ((retained.keys, rows.keys), (retained.values, rows.values)):
        torch.testing.assert_close(
            (kept * degrees_of(retained)[..., None]).sum(1), given.sum(1), atol=1e-3, rtol=0
        )
    for kept, given in ((retained.keys, rows.keys), (retained.values, rows.values)):
        assert torch.equal(kept[:, :2], given[:, :2])
        assert torch.equal(kept[:, -4:], given[:, -4:])
    assert degrees_of(retained)[:, [0, 1, -4, -3, -2, -1]].eq(1).all()


def test_attention_over_merged_duplicates_is_attention_over_all_tokens() -> None:
    keys, values = random_keys(3, 38), random_keys(3, 38, seed=1)
    # Four kinds of keys in every chunk of 8, each at an odd and an even place.
    for first in range(2, 34, 8):
        keys[:, first : first + 8] = keys[:, first : first + 8 : 2].repeat_interleave(2, dim=1)
    queries = torch.randn(3, 5, DIM, generator=torch.Generator().manual_seed(2)) * 2
    rows = rows_of(keys, values)
    exact = attend(queries, keys, values, torch.ones(3, 38))
    # Half of the 32 between sinks and window, at once.
    retained = replace(POLICY, r_init=0.5).compress(rows, plan_of(38, 22), 22)
    assert degrees_of(retained)[:, 2:-4].eq(2).all()
    merged = attend(queries, retained.keys, retained.values, degrees_of(retained))
    torch.testing.assert_close(merged, exact, atol=1e-5, rtol=1e-5)
    uncounted = attend(queries, retained.keys, retained.values, torch.ones_like(degrees_of(retained)))
    assert (uncounted - exact).abs().max() > 1e-2


def test_later_rounds_weigh_by_degrees() -> None:
    policy = Chelsea(num_sink=0, num_recent=0, chunk=8, r_init=0.5, alpha=0.0)
    keys = torch.ones(1, 8, DIM)
    values = torch.arange(8.0)[None, :, None].expand(1, 8, DIM).contiguous()
    # 0 and 2 are most like 1, the others are alone: clusters of unequal degrees meet in the next rounds.
    keys[0, [3, 4, 5, 6, 7]] = torch.randn(5, DIM, generator=torch.Generator().manual_seed(3)) + 2
    retained = policy.compress(rows_of(keys, values), plan_of(8, 1, 0, 0), 1)
    assert degrees_of(retained).tolist() == [[8.0]]
    torch.testing.assert_close(retained.values[0, 0], values[0].mean(0))
    torch.testing.assert_close(retained.keys[0, 0], keys[0].mean(0))


@pytest.mark.parametrize("chunked", [True, False])
def test_nothing_merges_across_a_chunk_border_unless_chunk_free(chunked: bool) -> None:
    # Values name their token, keys of token 9 (last of a chunk) and 10 (first of the next) are the same.
    keys, values = torch.randn(1, 22, 22, generator=torch.Generator().manual_seed(0)), torch.eye(22)[None]
    keys[0, 10] = keys[0, 9]
    retained = replace(POLICY, chunked=chunked).compress(rows_of(keys, values), plan_of(22, 21), 21)
    (merged,) = (degrees_of(retained)[0] > 1).nonzero()[:, 0].tolist()
    members = retained.values[0, merged].nonzero()[:, 0]
    if chunked:
        assert len(set(((members - 2) // 8).tolist())) == 1
    else:
        assert members.tolist() == [9, 10]
        assert retained.positions[0, merged] == 9


def test_errors_of_rounding_match_nothing_otherwise() -> None:
    """Rotated keys of few different tokens: the same two at the same distance are equally alike wherever they stand."""
    tokens = torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(1))
    table = rope_table(RopeSpec("default", 10000.0, DIM), 200, torch.device("cpu"), torch.float32)
    heads = random_keys(2, 6)[:, tokens].transpose(0, 1).flatten(1)
    rotated = rope(heads, table, torch.arange(200), 2, 0)[0].transpose(0, 1)
    found = match_rows(rotated, 32)
    kept = POLICY.compress(rows_of(rotated), plan_of(200, 60), 60).positions
    for seed in range(20):
        noise = 1 + 1e-7 * torch.randn(rotated.shape, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(match_rows(rotated * noise, 32).partner, found.partner)
        again = POLICY.compress(rows_of(rotated * noise), plan_of(200, 60), 60)
        assert torch.equal(again.positions, kept)


@pytest.mark.parametrize("chunk", [8, 100])
@pytest.mark.parametrize("max_similarities", [1, 40, 200])
def test_tiles_do_not_change_the_matches(chunk: int, max_similarities: int) -> None:
    keys = random_keys(3, 77)
    whole, tiled = match_rows(keys, chunk), match_rows(keys, chunk, max_similarities)
    assert torch.equal(whole.partner, tiled.partner)
    torch.testing.assert_close(whole.similarity, tiled.similarity)


def test_the_schedule_of_rounds_goes_on_from_call_to_call() -> None:
    # 106 rows, 100 of them in the middle: 0.35, 0.25, 0.15, 0.15, ... of what is left.
    rows = rows_of(random_keys(2, 106))

    def rounds_to(left: int, policy: Chelsea = POLICY, before: int = 0) -> int:
        return policy.compress(replace(rows, rounds=before), plan_of(106, left + 6), left + 6).rounds

    assert [rounds_to(left) for left in (65, 64, 49, 48, 42, 41)] == [1, 2, 2, 3, 3, 4]
    # From round 2 on it is 15 of 100.
    for before in (2, 7):
        assert [rounds_to(left, before=before) - before for left in (85, 84)] == [1, 2]
    # A ratio that would fall to nothing stays at 5 of 100.
    qwen = replace(POLICY, r_init=0.2)
    assert [rounds_to(left, qwen, before=2) for left in (95, 94)] == [3, 4]


def test_a_second_call_continues() -> None:
    rows = rows_of(random_keys(2, 120))
    plan = plan_of(120, 40)
    first = POLICY.compress(rows, plan, 40)
    grown = again(first, rows, num_new=30)
    second = POLICY.compress(grown, plan, 40)
    assert second.rounds > first.rounds
    assert degrees_of(second).sum(dim=1).tolist() == [150, 150]
    assert second.positions[:, -4:].tolist() == [[146, 147, 148, 149]] * 2
    assert torch.equal(second.positions[:, :2], first.positions[:, :2])
    # The first window is now merged like anything else; what was a mean still counts.
    total = (grown.values * degrees_of(grown)[..., None]).sum(1)
    torch.testing.assert_close(
        (second.values * degrees_of(second)[..., None]).sum(1), total, atol=1e-3, rtol=0
    )
    # Padding, where other layers keep more, changes nothing.
    padded = replace(
        grown,
        keys=torch.nn.functional.pad(grown.keys, (0, 0, 0, 7), value=float("nan")),
        values=torch.nn.functional.pad(grown.values, (0, 0, 0, 7), value=float("nan")),
        positions=torch.nn.functional.pad(grown.positions, (0, 7), value=-1),
        notes=torch.nn.functional.pad(grown.notes, (0, 7)),
        is_even=False,
    )
    same = POLICY.compress(padded, plan, 40)
    assert torch.equal(same.positions, second.positions)
    assert torch.equal(same.keys, second.keys)


def test_the_model_dtype_is_kept_and_sums_are_not_made_in_it() -> None:
    keys = random_keys(2, 200)
    rows = rows_of(keys)
    halves = replace(rows, keys=rows.keys.bfloat16(), values=rows.values.bfloat16())
    retained = POLICY.compress(halves, plan_of(200, 20), 20)
    wide = POLICY.compress(
        replace(halves, keys=halves.keys.float(), values=halves.values.float()), plan_of(200, 20), 20
    )
    assert retained.keys.dtype == retained.values.dtype == torch.bfloat16
    assert retained.notes.dtype == torch.float32
    assert torch.equal(retained.keys, wide.keys.bfloat16())
    assert torch.equal(retained.values, wide.values.bfloat16())


@pytest.mark.parametrize("budget", [2, 3, 20, 144, 1000])
def test_a_budget_of_any_size_is_kept_exactly(budget: int) -> None:
    policy = Chelsea()
    plan = policy.plan(1001, budget)
    assert policy.recompression(plan) == Recompression(128, together=True)
    assert policy.compress(rows_of(random_keys(1, 1001)), plan, budget).counts.tolist() == [budget]


def test_a_budget_for_the_whole_prompt_needs_no_rounds() -> None:
    assert Chelsea().recompression(Chelsea().plan(100, 100)) is None


def test_a_budget_without_room_for_the_middle_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 7"):
        POLICY.compress(rows_of(random_keys(1, 30)), plan_of(30, 10), 6)
