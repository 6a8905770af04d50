"""A decode batch: sequences that are served alike are neighbours, and its sizes decide the kernels' launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.state.lane_inputs import LaneInputs, fields_of, padding, table_of
from gpu_worker.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Buckets:
    """Rounds a batch's sizes up, so that few captured steps serve many batches; exact where steps are not captured."""

    is_exact: bool

    def lanes(self, count: int) -> int:
        """1, 2, 4, 8, then at most a fourth more: multiples of 8, 16 above 64, 32 above 128."""
        if self.is_exact:
            return count
        if count <= 8:
            return 1 << (count - 1).bit_length()
        unit = 8 if count <= 64 else 16 if count <= 128 else 32
        return -(-count // unit) * unit

    def positions(self, count: int) -> int:
        """At most an eighth more, so that steps are captured again only now and then as sequences grow."""
        if self.is_exact or count == 0:
            return count
        unit = max(1024, (1 << (count.bit_length() - 1)) // 8)
        return -(-count // unit) * unit

    def width(self, count: int) -> int:
        return count if self.is_exact else -(-count // 64) * 64


# Lanes times positions of a group that selects: what it scores at once has memory from the start.
MAX_SCORED = 1 << 21

# Sequences of one are served alike: the policy ("" where all is attended), and whether they may miss.
Kind = tuple[str, bool]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The host's description of a group: groups of equal shape run the same kernels on the same grids.

    policy: "" where all tokens are attended.
    can_miss: whether a selected token may be in the arena only.
    num_lanes: lanes of the group, padding included.
    num_positions: more than any position that is scored, or that is attended where all are.
    num_selected: K; no lane selects more tokens.
    num_fixed: F; no lane has more tokens in its sinks and window, the new token included.
    """

    policy: str
    can_miss: bool
    num_lanes: int
    num_positions: int
    num_selected: int = 0
    num_fixed: int = 0

    def covers(self, other: GroupShape) -> bool:
        """Return whether a step of this shape serves a group of the other one, with padding."""
        return (
            (self.policy, self.can_miss) == (other.policy, other.can_miss)
            and self.num_lanes >= other.num_lanes
            and self.num_positions >= other.num_positions
            and self.num_selected >= other.num_selected
            and self.num_fixed >= other.num_fixed
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring lanes of a decode batch that are served alike.

    first_lane: its first lane in the batch. lanes: its part of the batch's inputs. sequences: of its first lanes; the
    others are padding. A captured step sees shape and lanes only; `sequences` are for work on the host.
    """

    shape: GroupShape
    first_lane: int
    lanes: LaneInputs
    sequences: tuple[Sequence, ...]

    def part_of(self, batch: Tensor) -> Tensor:
        """The group's lanes of a tensor of the whole batch."""
        return batch[self.first_lane : self.first_lane + self.shape.num_lanes]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """All that a step's launches follow from: one captured step serves every batch of this shape."""

    groups: tuple[GroupShape, ...]
    # Of layers that serve every sequence alike, by cache: the whole batch as one group.
    everyone: tuple[GroupShape, ...] = ()

    @property
    def size(self) -> tuple[int, int, int]:
        """The cost of a step of this shape, to compare it with other shapes that serve the same batch."""
        return (
            sum(group.num_lanes for group in self.groups),
            sum(group.num_lanes * group.num_selected for group in self.groups),
            sum(group.num_lanes * group.num_positions for group in self.groups),
        )

    def covers(self, other: BatchShape) -> bool:
        """Return whether a step of this shape serves a batch of the other one, with padding."""
        if len(self.groups) != len(other.groups) or len(self.everyone) != len(other.everyone):
            return False
        mine, others = (*self.groups, *self.everyone), (*other.groups, *other.everyone)
        return all(one.covers(another) for one, another in zip(mine, others, strict=True))


@dataclass(frozen=True, slots=True)
class Batch:
    """members: the sequences of each group, in order. table: int64 [NUM_FIELDS, lanes], a column for each lane.
    padding: the seat of padding lanes, which no sequence has."""

    shape: BatchShape
    members: list[list[Sequence]]
    table: npt.NDArray[np.int64]
    padding: int = 0

    @property
    def sequences(self) -> list[Sequence]:
        """In the order of their lanes."""
        return [sequence for members in self.members for sequence in members]

    @classmethod
    def of(
        cls,
        sequences: list[Sequence],
        kind_of: Callable[[Sequence], Kind],
        shape_of: Callable[[list[Sequence]], GroupShape],
        buckets: Buckets,
        padding_seat: int,
        shapes_of_all: Callable[[list[Sequence], int, int], tuple[GroupShape, ...]],
    ) -> Batch:
        """shape_of: of a group, which are the sequences of one kind; made with the same buckets. shapes_of_all: of the
        whole batch in layers that serve every sequence alike, by its sequences, its lanes, and the tokens of the
        longest with its new one, rounded up."""
        by_kind: dict[Kind, list[Sequence]] = {}
        for sequence in sequences:
            by_kind.setdefault(kind_of(sequence), []).append(sequence)
        # Where all is attended comes last: state of those that select is kept by their lanes.
        kinds = sorted(by_kind, key=lambda kind: (not kind[0], kind))
        members = [part for kind in kinds for part in _divided(by_kind[kind], shape_of)]
        shapes = [shape_of(group) for group in members]
        columns: list[tuple[int, ...]] = []
        for shape, group in zip(shapes, members, strict=True):
            columns += map(fields_of, group)
            columns += [padding(padding_seat)] * (shape.num_lanes - len(group))
        longest = buckets.positions(max([sequence.num_tokens for sequence in sequences]) + 1)
        everyone = shapes_of_all(sequences, len(columns), longest)
        return cls(BatchShape(tuple(shapes), everyone), members, table_of(columns), padding_seat)

    def padded_to(self, shape: BatchShape) -> Batch:
        """The same sequences in a shape that covers this one's."""
        columns: list[tuple[int, ...]] = []
        first = 0
        for own, wider, members in zip(self.shape.groups, shape.groups, self.members, strict=True):
            columns += map(tuple, self.table[:, first : first + len(members)].T.tolist())
            columns += [padding(self.padding)] * (wider.num_lanes - len(members))
            first += own.num_lanes
        return replace(self, shape=shape, table=table_of(columns))

    def blank(self) -> Batch:
        """A batch of this shape of padding only: a step of it changes nothing that any sequence has."""
        return replace(self, table=table_of([padding(self.padding)] * self.table.shape[1]))

    def groups(self, table: Tensor) -> list[Group]:
        """The groups over a device's copy of the table."""
        groups, first = [], 0
        for shape, members in zip(self.shape.groups, self.members, strict=True):
            lanes = LaneInputs.of(table[:, first : first + shape.num_lanes])
            groups.append(Group(shape, first, lanes, tuple(members)))
            first += shape.num_lanes
        return groups

    def without_padding(self, tensor: Tensor) -> Tensor:
        """The sequences' part of a tensor [lanes, ...]; a view where there is one group."""
        parts, first = [], 0
        for shape, members in zip(self.shape.groups, self.members, strict=True):
            parts.append(tensor[first : first + len(members)])
            first += shape.num_lanes
        return join(parts)


def _divided(
    sequences: list[Sequence], shape_of: Callable[[list[Sequence]], GroupShape]
) -> list[list[Sequence]]:
    """Sequences of a kind in as few groups as score no more than `MAX_SCORED` at once: the longest together."""
    shape = shape_of(sequences)
    if len(sequences) == 1 or not shape.num_selected or shape.num_lanes * shape.num_positions <= MAX_SCORED:
        return [sequences]
    longest_first = sorted(sequences, key=lambda sequence: -sequence.num_tokens)
    most = max(1, MAX_SCORED // shape.num_positions)
    return [longest_first[:most], *_divided(longest_first[most:], shape_of)]


def join(parts: list[Tensor]) -> Tensor:
    """One after the other along the first dimension; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
