"""The row for unselected tokens is complete before it is attended, and before its memory is given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from policy_index import SHAPE, queries_of
from torch import Tensor

from gpu_worker.caches.recall.selection import RecallParts, Selection
from gpu_worker.errors import StoreUnavailable
from gpu_worker.kernels.attention import Rest, attend_slots
from gpu_worker.policies.recall import Candidates
from gpu_worker.state.batch import Group, GroupShape
from gpu_worker.state.lane_inputs import NUM_FIELDS, LaneInputs

LANES = LaneInputs.of(torch.zeros(NUM_FIELDS, 2, dtype=torch.int64))
GROUP = Group(GroupShape("", False, 2, 60, 5, 3), 0, LANES, ())
ROWS = torch.randn(200, 2 * SHAPE.head_dim, generator=torch.Generator().manual_seed(0))
FIXED = torch.arange(100, 103).int().expand(1, SHAPE.num_kv_heads, -1)


class Later:
    """A side stream that does nothing until it is waited for."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    @contextmanager
    def queue(self) -> Iterator[None]:
        yield

    def join(self) -> None:
        while self.waiting:
            self.waiting.pop()()


class Policy:
    """Selects the first tokens; what stands in for the others is one row for all heads."""

    stands_in = True

    def __init__(self, beside: Later) -> None:
        self._beside = beside

    def select(self, _index: None, candidates: Candidates, _counts: Tensor, width: int) -> Tensor:
        return torch.arange(width).expand(len(candidates.query), SHAPE.num_kv_heads, -1)

    def stand_in(self, _index: None, _candidates: Candidates, _selected: Tensor, rest: Rest) -> None:
        def write() -> None:
            rest.values.fill_(10.0)
            rest.log_weights.fill_(0.5)

        self._beside.waiting.append(write)


def selection(beside: Later, find: Callable[..., Tensor]) -> Selection:
    pool, fixed, whole = Mock(rows=ROWS), Mock(at=lambda *_: FIXED), Mock(find=find)
    parts = RecallParts(
        SHAPE, pool, fixed, whole, None, None, None, Mock(), Mock(of=lambda *_: {}), None,
        beside,  # type: ignore[arg-type]
    )  # fmt: skip
    return Selection(GROUP, Policy(beside), None, parts)  # type: ignore[arg-type]


def test_it_is_attended_once_it_is_there(poisoned_memory: None) -> None:
    beside, query = Later(), torch.randn(2, 4, SHAPE.head_dim, generator=torch.Generator().manual_seed(1))

    def find(_lanes: LaneInputs, _layer: int, positions: Tensor, _found: Tensor) -> Tensor:
        assert beside.waiting, "rows are looked up while it is computed"
        return positions.int()

    one = selection(beside, find)
    for layer in range(2):
        found = one.attend(layer, queries_of(query))
        assert not beside.waiting
        rest = Rest(torch.full(query.shape, 10.0), torch.full((2, 4), 0.5))
        expected = attend_slots(query, ROWS, FIXED, LANES.seats, one.latest.int(), SHAPE.scale, rest)
        torch.testing.assert_close(found, expected)


def test_a_step_that_fails_leaves_nothing_under_way() -> None:
    beside = Later()

    def fail(*_: object) -> Tensor:
        assert beside.waiting
        raise StoreUnavailable("gone")

    with pytest.raises(StoreUnavailable):
        selection(beside, fail).attend(0, queries_of(torch.ones(2, 4, SHAPE.head_dim)))
    assert not beside.waiting
