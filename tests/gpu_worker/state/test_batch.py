"""How a batch falls into groups, how far its sizes are rounded up, and that padding changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_rig import Rig, counted, mixed_requests
from offload_rig import make_sequence

from gpu_worker.caches import HotCacheSize
from gpu_worker.state.batch import Batch, BatchShape, Buckets, GroupShape, Kind, join
from gpu_worker.state.lane_inputs import NUM_FIELDS, LaneInputs
from gpu_worker.state.sequence import Sequence

EXACT, ROUNDED = Buckets(is_exact=True), Buckets(is_exact=False)
PADDING = (0, -1, 0, 0, 0, 1, -1, -1, 0)


def test_rows_are_a_power_of_two_up_to_eight_then_at_most_a_fourth_more() -> None:
    counts = [1, 2, 3, 4, 5, 8, 9, 17, 65, 100, 128, 130, 256]
    assert [ROUNDED.lanes(count) for count in counts] == [1, 2, 4, 4, 8, 8, 16, 24, 80, 112, 128, 160, 256]
    assert [EXACT.lanes(count) for count in counts] == counts


def test_positions_are_rounded_up_by_an_eighth_or_1024_at_most() -> None:
    for count in [1, 1023, 1024, 1025, 8191, 8192, 8193, 16385, 100_000, 131_072]:
        rounded = ROUNDED.positions(count)
        assert count <= rounded < count + max(1024, count / 8)
        assert ROUNDED.positions(rounded) == rounded
        assert EXACT.positions(count) == count
    # So a sequence that grows from one token to 128 Ki is captured at few sizes.
    assert len({ROUNDED.positions(count) for count in range(1, 131_073)}) < 64
    assert ROUNDED.positions(0) == 0


def test_widths_are_multiples_of_64_and_nothing_stays_nothing() -> None:
    assert [ROUNDED.width(count) for count in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert EXACT.width(65) == 65


def seated(name: str, seat: int, num_tokens: int = 40) -> Sequence:
    sequence = make_sequence(name, seat, num_tokens)
    sequence.num_tokens, sequence.next_token = num_tokens, seat + 50
    sequence.num_slots = sequence.capacity
    return sequence


def kind_of(sequence: Sequence) -> Kind:
    """By the first letter: "d" is dense, "h" has a hot cache, any other has every token in a slot."""
    letter = sequence.sequence_id[0]
    return "" if letter == "d" else "pqcache", letter == "h"


def make_batch(
    sequences: list[Sequence],
    buckets: Buckets,
    padding_seat: int = 8,
    some_dense: bool = False,
) -> Batch:
    def shape_of(group: list[Sequence]) -> GroupShape:
        longest = buckets.positions(max(sequence.num_tokens for sequence in group) + 1)
        return GroupShape(*kind_of(group[0]), buckets.lanes(len(group)), longest)

    def shapes_of_all(_all: list[Sequence], num_lanes: int, num_tokens: int) -> tuple[GroupShape, ...]:
        return (GroupShape("", False, num_lanes, num_tokens),) if some_dense else ()

    return Batch.of(sequences, kind_of, shape_of, buckets, padding_seat, shapes_of_all)


def names(batch: Batch) -> list[list[str]]:
    return [[sequence.sequence_id for sequence in members] for members in batch.members]


def test_who_is_served_alike_is_one_group_in_the_order_of_coming() -> None:
    sequences = [seated(name, seat) for seat, name in enumerate(["p0", "h1", "d2", "p3", "h4", "d5"])]
    batch = make_batch(sequences, EXACT, 8, some_dense=True)
    assert names(batch) == [["p0", "p3"], ["h1", "h4"], ["d2", "d5"]]
    assert [sequence.seat for sequence in batch.sequences] == [0, 3, 1, 4, 2, 5]
    rows = LaneInputs.of(torch.from_numpy(batch.table))
    assert rows.seats.tolist() == [0, 3, 1, 4, 2, 5]
    assert rows.token_ids.tolist() == [50, 53, 51, 54, 52, 55]
    assert rows.positions.tolist() == [40] * 6
    assert batch.shape.everyone == (GroupShape("", False, 6, 41),)
    assert make_batch(sequences, EXACT, 8).shape.everyone == ()


def test_a_row_says_what_a_step_must_know_of_its_sequence() -> None:
    sequence = seated("p", 3, 60)
    sequence.leaving, sequence.mark = 17, 5
    batch = make_batch([sequence], EXACT, padding_seat=4)
    # 60 tokens of which half are attended: 4 sinks, 13 recent, 13 selected.
    assert sequence.ring_size == 14
    column = (53, 60, 3, 4, 47, 13, 256, 17, 4 + 60 % 14, 5)
    assert batch.table[:, 0].tolist() == list(column)


def test_groups_are_padded_each_and_padding_has_a_seat_of_its_own() -> None:
    sequences = [seated(name, seat) for seat, name in enumerate(["p0", "h1", "p2", "p3"])]
    batch = make_batch(sequences, ROUNDED)
    assert [shape.num_lanes for shape in batch.shape.groups] == [4, 1]
    rows = LaneInputs.of(torch.from_numpy(batch.table))
    assert rows.seats.tolist() == [0, 2, 3, 8, 1]
    assert rows.positions.tolist() == [40, 40, 40, -1, 40]
    padding = batch.table[:, 3]
    assert padding.tolist() == [*PADDING[:2], 8, *PADDING[2:]]
    first, second = batch.groups(torch.from_numpy(batch.table))
    assert (first.first_lane, second.first_lane) == (0, 4)
    assert [one.sequence_id for one in first.sequences] == ["p0", "p2", "p3"]
    assert second.lanes.seats.tolist() == [1]
    tensor = torch.arange(10).view(5, 2)
    assert torch.equal(first.part_of(tensor), tensor[:4])
    assert torch.equal(second.part_of(tensor), tensor[4:])
    assert batch.without_padding(tensor)[:, 0].tolist() == [0, 2, 4, 8]


def test_batches_of_one_shape_differ_in_their_tables_only() -> None:
    few = [seated(name, seat, 30 + seat) for seat, name in enumerate(["p0", "p1", "p2"])]
    more = [seated(name, seat, 90 + seat) for seat, name in enumerate(["p0", "p1", "p2", "p3"])]
    first, second = (make_batch(some, ROUNDED, padding_seat=8) for some in (few, more))
    assert first.shape == second.shape
    assert hash(first.shape) == hash(second.shape)
    assert isinstance(first.shape, BatchShape)
    assert first.table.shape == second.table.shape
    assert not np.array_equal(first.table, second.table)


def test_one_group_without_padding_is_a_view() -> None:
    batch = make_batch([seated("p0", 0)], EXACT, padding_seat=1)
    tensor = torch.zeros(1, 3)
    assert batch.without_padding(tensor).data_ptr() == tensor.data_ptr()
    assert join([tensor]) is tensor


def test_a_batch_fits_every_shape_that_covers_its_own() -> None:
    sequences = [seated(name, seat) for seat, name in enumerate(["p0", "h1", "p2", "p3"])]
    batch = make_batch(sequences, ROUNDED, padding_seat=6, some_dense=True)
    wide = widened(batch.shape)
    assert wide.covers(batch.shape)
    assert not batch.shape.covers(wide)
    assert not BatchShape(wide.groups[:1], wide.everyone).covers(batch.shape)
    assert not BatchShape(wide.groups).covers(batch.shape)
    padded = batch.padded_to(wide)
    assert padded.table.shape == (NUM_FIELDS, 4 + 3 + 1 + 3)
    tensor = torch.from_numpy(padded.table.T)
    assert torch.equal(padded.without_padding(tensor), batch.without_padding(torch.from_numpy(batch.table.T)))
    # The other lanes have the padding's seat and no token.
    assert sorted(set(padded.table[2].tolist())) == [0, 1, 2, 3, 6]
    assert (padded.table[1] == -1).sum() == 7
    assert (batch.blank().table[1] == -1).all()


def widened(shape: BatchShape) -> BatchShape:
    groups = [
        replace(
            group, num_lanes=group.num_lanes + 3, num_selected=group.num_selected and group.num_selected + 64
        )
        for group in shape.groups
    ]
    num_lanes = sum(group.num_lanes for group in groups)
    everyone = tuple(replace(one, num_lanes=num_lanes) for one in shape.everyone)
    return BatchShape(tuple(groups), everyone)


# Every two of the three together.
@pytest.mark.parametrize(
    ("hot_cache", "max_num_seqs", "trains_indexes"),
    [
        (HotCacheSize(), 10, False),
        (HotCacheSize(), 11, True),
        (HotCacheSize(tokens=1), 10, True),
        (HotCacheSize(tokens=1), 11, False),
    ],
)
def test_padding_changes_nobodys_tokens_or_account(
    hot_cache: HotCacheSize, max_num_seqs: int, trains_indexes: bool
) -> None:
    """As on a GPU, in wider shapes than are needed, but with references. What padding reads is another's, or nothing
    that was ever written."""
    rigs = [
        Rig(
            max_num_seqs=max_num_seqs,
            hot_cache=hot_cache,
            trains_indexes=trains_indexes,
            full_layers=1,
        )
        for _ in range(2)
    ]
    plain, padded = rigs
    padded.runner.caches.buckets = ROUNDED
    batch_of = padded.runner.caches.batch

    def wide_batch(some: list[Sequence]) -> Batch:
        batch = batch_of(some)
        return batch.padded_to(widened(batch.shape))

    padded.runner.caches.batch = wide_batch  # type: ignore[method-assign]
    padded.runner.pool.rows.fill_(float("nan"))
    for rig in rigs:
        rig.run(*mixed_requests())
        rig.check_empty()
    for name, record in plain.records.items():
        other = padded.records[name]
        assert other.tokens == record.tokens
        assert (other.usage.hit_rate, other.usage.bytes_moved) == (
            record.usage.hit_rate,
            record.usage.bytes_moved,
        )
        assert other.usage.recall_rate == record.usage.recall_rate
    assert counted(padded.engine.stats()) == counted(plain.engine.stats())
