"""Where each attended token of a decode step stands in the list that attention reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class AttendedOrder:
    """Sinks, selected, window and the new token, in this order; the same in every layer of a step.

    Only the selected ones differ between layers. fixed: int64 [B, F], the positions of all others, -1 pads in front
    and at least one of them; the last is the new token. order: int64 [B, A], where each attended one is found in the
    K selected followed by the F fixed ones. is_padded: whether a sequence may attend fewer than A.
    """

    fixed: Tensor
    order: Tensor
    is_padded: bool

    @classmethod
    def of(cls, sequences: list[Sequence], num_selected: int, device: torch.device) -> AttendedOrder:
        """num_selected: K, the width of the selection."""
        fixed_width = 1 + max(_num_fixed(sequence) for sequence in sequences)
        counts = [sequence.plan.num_selected or 0 for sequence in sequences]
        width = max(_num_fixed(sequence) + count for sequence, count in zip(sequences, counts, strict=True))
        fixed = np.full((len(sequences), fixed_width), -1)
        # What is not set is a pad: the first of the fixed ones.
        order = np.full((len(sequences), width), num_selected)
        for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            num_fixed = _num_fixed(sequence)
            window_begin = sequence.window_begin if sequence.plan.selects else sequence.plan.num_sink
            num_sink, pads = sequence.plan.num_sink, fixed_width - num_fixed
            fixed[row, pads : pads + num_sink] = np.arange(num_sink)
            fixed[row, pads + num_sink :] = np.arange(window_begin, sequence.num_tokens + 1)
            begin = width - num_fixed - count
            order[row, begin : begin + num_sink] = num_selected + pads + np.arange(num_sink)
            order[row, begin + num_sink : begin + num_sink + count] = np.arange(count)
            order[row, begin + num_sink + count :] = num_selected + pads + np.arange(num_sink, num_fixed)
        both = torch.tensor(np.concatenate([fixed, order], axis=1), device=device)
        # A selection may fall short of its count: too few candidates, or scores that are NaN.
        is_padded = num_selected > 0 or any(_num_fixed(sequence) < width for sequence in sequences)
        return cls(both[:, :fixed_width], both[:, fixed_width:], is_padded)

    def join(self, selected: Tensor, fixed: Tensor) -> Tensor:
        """What belongs to the selected [B, H_kv, K] and to the fixed [B, H_kv, F] tokens as [B, H_kv, A]."""
        joined = torch.cat([selected, fixed], dim=-1)
        return joined.gather(-1, self.order[:, None].expand(-1, joined.shape[1], -1))

    def positions(self, selected: Tensor) -> Tensor:
        """The attended positions of many layers: int64 [layers, B, H_kv, K] to [layers, B, H_kv, A]; -1 pads."""
        every = self.fixed[:, None].expand(*selected.shape[:3], -1)
        joined = torch.cat([selected, every], dim=-1)
        return joined.gather(-1, self.order[:, None].expand(*selected.shape[:3], -1))


def num_taken(sequence: Sequence) -> int:
    """Tokens that the selection finds: as many as the plan wants, or all candidates."""
    return min(sequence.plan.num_selected or 0, sequence.window_begin - sequence.plan.num_sink)


def _num_fixed(sequence: Sequence) -> int:
    plan = sequence.plan
    # Who does not select attends everything.
    begin = sequence.window_begin if plan.selects else plan.num_sink
    return plan.num_sink + sequence.num_tokens + 1 - begin
