"""The inputs of a decode step for each lane of its batch: numbers only, in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.state.sequence import Sequence

NUM_FIELDS = 10


@dataclass(frozen=True, slots=True)
class LaneInputs:
    """int64 [B] each, on the device.

    token_ids: the inputs. positions: theirs; -1 for a padding lane, which writes nothing and attends nothing.
    seats: of the lanes. begin, end: candidates are the positions [begin, end), sinks before, window
    behind. counts: how many of them are selected. capacities: slots of each (layer, KV head). leaving: the position
    that leaves the window at this step, -1 for none. ring: the column of the fixed slots that the new token takes, -1
    for none. marks: numbers that a retain policy passes to its own `observe`.
    """

    token_ids: Tensor
    positions: Tensor
    seats: Tensor
    begin: Tensor
    end: Tensor
    counts: Tensor
    capacities: Tensor
    leaving: Tensor
    ring: Tensor
    marks: Tensor

    @classmethod
    def of(cls, table: Tensor) -> LaneInputs:
        """The rows of a table int64 [NUM_FIELDS, B], as views."""
        return cls(*table.unbind(0))


def fields_of(sequence: Sequence) -> tuple[int, ...]:
    """The fields of a sequence's next token: NUM_FIELDS numbers, a column of a table."""
    plan = sequence.plan
    return (
        sequence.next_token,
        sequence.num_tokens,
        sequence.seat,
        plan.num_sink,
        sequence.window_begin,
        plan.num_selected or 0,
        sequence.num_slots,
        sequence.leaving,
        sequence.ring_column,
        sequence.mark,
    )


def padding(seat: int) -> tuple[int, ...]:
    """The column of a padding lane, on the seat that no sequence has."""
    return 0, -1, seat, 0, 0, 0, 1, -1, -1, 0


def drawn_at(place: int) -> int:
    """Stands for a token that the host does not know yet: the one at this place of those that were drawn last."""
    return -2 - place


def fill_drawn(table: Tensor, drawn: Tensor) -> None:
    """Put drawn tokens, int64 [n], where a table [NUM_FIELDS, B] names their places; both on the device."""
    token_ids = table[0]
    named = drawn[(-2 - token_ids).clamp(min=0)]
    token_ids.copy_(torch.where(token_ids < -1, named, token_ids))


def table_of(columns: list[tuple[int, ...]]) -> npt.NDArray[np.int64]:
    """int64 [NUM_FIELDS, B]."""
    return np.ascontiguousarray(np.array(columns, np.int64).T)
