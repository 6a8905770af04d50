"""Decodes tokens into slots as the engine does, for the tests of policies that change what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpu_worker.policies.base import Plan
from gpu_worker.policies.retain import LayerRows, RetainPolicy, StepSlots

DIM, SCALE = 8, 0.5


READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
READS |= {"nonzero", "masked_select", "unique", "repeat_interleave"}


class Captured(TorchFunctionMode):
    """Refuses what no captured step can do: data read by the host, and shapes that depend on it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", "")
        index = args[1] if name in ("__getitem__", "__setitem__") else None
        if name in READS or (isinstance(index, Tensor) and index.dtype == torch.bool):
            raise RuntimeError(f"{name} reads data in a captured step")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Stream:
    """One layer of a sequence, prompt and what is decoded. keys, values: [H_kv, T, d]. queries: [H_q, T, d]."""

    keys: Tensor
    values: Tensor
    queries: Tensor

    @classmethod
    def random(cls, seed: int, num_tokens: int, group_size: int = 1, num_kv_heads: int = 2) -> Stream:
        generator = torch.Generator().manual_seed(seed)
        keys, values = torch.randn(2, num_kv_heads, num_tokens, DIM, generator=generator)
        queries = torch.randn(num_kv_heads * group_size, num_tokens, DIM, generator=generator)
        return cls(keys, values, 2 * queries)

    def prompt(self, policy: RetainPolicy, plan: Plan, layer: int = 0, seed: int = 0) -> LayerRows:
        num_tokens = plan.num_prompt_tokens
        rows = torch.cat([self.keys, self.values], dim=-1)[:, :num_tokens]
        queries = self.queries[:, num_tokens - policy.num_queries(plan) : num_tokens]
        return LayerRows.of_prompt(layer, 2, rows, queries, SCALE, seed)

    def weights(self, head: int, query: int, positions: Sequence[int]) -> list[float]:
        """Softmax weights over these tokens, the mean over the group, in float64."""
        group_size = self.queries.shape[0] // self.keys.shape[0]
        queries = self.queries[head * group_size : (head + 1) * group_size, query].double()
        scores = queries @ self.keys[head, list(positions)].double().T * SCALE
        return scores.softmax(dim=-1).mean(dim=0).tolist()


@dataclass(slots=True)
class Slots:
    """The slots of one layer of one sequence, in any order; `width` of them, of which it may fill `capacity`."""

    policy: RetainPolicy
    plan: Plan
    stream: Stream
    width: int
    capacity: int
    layer: int = 0
    seed: int = 0
    num_tokens: int = 0
    since: int = 0
    most: int = 0
    positions: Tensor = field(init=False)
    notes: Tensor = field(init=False)
    values: Tensor = field(init=False)
    history: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.plan.num_prompt_tokens
        self._take(self.stream.prompt(self.policy, self.plan, self.layer, self.seed))

    def _take(self, rows: LayerRows) -> None:
        retained = self.policy.compress(rows, self.plan, self.plan.budget_tokens)
        shape = (retained.positions.shape[0], self.width)
        order = torch.randperm(self.width, generator=torch.Generator().manual_seed(7))[
            : retained.counts.max()
        ]
        self.positions = torch.full(shape, -1)
        self.notes, self.values = torch.zeros(shape), torch.zeros(*shape, DIM)
        self.positions[:, order], self.values[:, order] = retained.positions, retained.values
        if retained.notes is not None:
            self.notes[:, order] = retained.notes
        self.history = retained.history
        self.since = 0

    def compress(self) -> None:
        order = self.positions.argsort(dim=1)[:, -int((self.positions[0] >= 0).sum()) :]
        positions, wide = self.positions.gather(1, order), order[..., None].expand(-1, -1, DIM)
        keys = self.stream.keys.gather(1, positions[..., None].expand(-1, -1, DIM))
        rows = self.stream.prompt(self.policy, self.plan, self.layer)
        rows = replace(rows, keys=keys, positions=positions, queries=rows.queries[:, :0])
        rows = replace(rows, values=self.values.gather(1, wide), notes=self.notes.gather(1, order))
        if self.history is not None:
            padding = order.shape[1] - self.history.shape[1]
            rows = replace(rows, history=torch.nn.functional.pad(self.history, (0, 0, 0, padding)))
        self._take(replace(rows, num_tokens=self.num_tokens))

    def kept(self, head: int) -> list[int]:
        return sorted(position for position in self.positions[head].tolist() if position >= 0)

    def of(self, head: int, position: int) -> int:
        """The slot of a token."""
        return self.positions[head].tolist().index(position)


def decode(batch: list[list[Slots]]) -> None:
    """One step of sequences [B] of layers [L]: evict, give, take the slot, attend, observe, compress."""
    policy, every = batch[0][0].policy, [slots for layers in batch for slots in layers]
    begins = [layers[0].plan.num_sink for layers in batch]
    ends = [policy.window_begin(layers[0].plan, layers[0].num_tokens) for layers in batch]
    step = StepSlots(
        torch.stack([torch.stack([slots.positions for slots in layers]) for layers in batch]),
        torch.stack([torch.stack([slots.notes for slots in layers]) for layers in batch]),
        torch.tensor(begins),
        torch.tensor(ends),
        torch.tensor([layers[0].num_tokens for layers in batch]),
    )
    if policy.evicts:
        with Captured():
            evicted = policy.evict(step)
    for index, slots in enumerate(every):
        for head in range(slots.positions.shape[0]):
            is_full = int((slots.positions[head] >= 0).sum()) == slots.capacity
            place = (
                int(evicted.slots.flatten(0, 1)[index, head])
                if is_full
                else int(slots.positions[head].argmin())
            )
            if is_full and evicted.gift is not None:
                value, heirs = (
                    slots.values[head, place].clone(),
                    evicted.gift.slots.flatten(0, 1)[index, head],
                )
                share = evicted.gift.share.flatten(0, 1)[index, head]
                slots.values[head, heirs[heirs >= 0]] += share * value
            assert is_full or slots.positions[head, place] < 0
            slots.positions[head, place], slots.notes[head, place] = slots.num_tokens, 0
            slots.values[head, place] = slots.stream.values[head, slots.num_tokens]
            slots.most = max(slots.most, int((slots.positions[head] >= 0).sum()))
        weights = torch.zeros_like(slots.notes)
        for head in range(weights.shape[0]):
            weights[head, [slots.of(head, position) for position in slots.kept(head)]] = torch.tensor(
                slots.stream.weights(head, slots.num_tokens, slots.kept(head))
            )
        again = policy.recompression(slots.plan)
        marks = torch.tensor([again.mark(again.interval - slots.since) if again else 0])
        slots.num_tokens += 1
        slots.since += 1
        with Captured():
            policy.observe(slots.notes[None], weights[None], marks)
        if again and slots.since == again.interval:
            slots.compress()
