"""The retain cache: what a policy keeps of each prefilled layer, and the tokens decoded since."""

from __future__ import annotations

from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gpu_worker.caches.base import Cache
from gpu_worker.caches.probe import Probe
from gpu_worker.caches.retain.kept_attention import RetainParts
from gpu_worker.caches.retain.kept_rows import KeptRows
from gpu_worker.caches.retain.kept_slots import KeptSlots
from gpu_worker.caches.retain.step import RetainStep
from gpu_worker.caches.snapshots import MAX_ELEMENTS, LanePlace, Snapshot, spread
from gpu_worker.errors import CapacityError, RequestError, no_room_for_policy
from gpu_worker.policies.base import CacheShape, PromptAttention
from gpu_worker.policies.retain import LayerRows, Recompression, Retained, RetainPolicy, prompt_positions
from gpu_worker.state.batch import Buckets, Group, GroupShape
from gpu_worker.state.block_tables import BlockTables
from gpu_worker.state.sequence import KeptLayer, Sequence
from gpu_worker.state.slot_pool import SlotPool, blocks_of_heads, num_blocks


def retain_policy(sequence: Sequence) -> RetainPolicy:
    """The policy of a sequence that the retain cache serves; CacheSet gives it no other."""
    return cast(RetainPolicy, sequence.policy)


class RetainCache(Cache):
    """One cache for every retain policy and any mix of them. A layer's slots are taken when it is compressed, but
    reserved from admission on."""

    def __init__(self, shape: CacheShape, pool: SlotPool, block_tables: BlockTables, probe: Probe) -> None:
        super().__init__(shape, block_tables)
        self._pool = pool
        self.kept = KeptSlots(pool, shape)
        self._rows = KeptRows(shape, pool, block_tables, self.kept)
        self._parts = RetainParts(shape, pool, block_tables, self.kept, probe)
        # Of the prompt that had a layer last: the next layer is mostly its own.
        self._positions: Tensor | None = None
        # A waiting sequence is asked for its blocks at every step.
        self._budgets: WeakKeyDictionary[Sequence, list[int]] = WeakKeyDictionary()

    @property
    def state(self) -> tuple[object, ...]:
        return self.kept.state

    def num_blocks(self, sequence: Sequence, num_free_blocks: int) -> int:
        """Raises RequestError where the policy cannot serve the budget."""
        slots = sum(self._layer_blocks(sequence, layer) for layer in range(self.num_layers))
        return slots + self._pool.blocks_of_pages(self.missing_pages(sequence, sequence.num_backed))

    def missing_pages(self, sequence: Sequence, num_tokens: int) -> int:
        if sequence.seat >= 0 and self.block_tables.num_held(sequence.seat):
            return 0
        most = self._most_slots(sequence)
        return self.kept.pages_for(most) + self.block_tables.missing_pages(-1, most)

    def num_held_pages(self, seat: int) -> int:
        return super().num_held_pages(seat) + self.kept.num_held_pages(seat)

    def _most_slots(self, sequence: Sequence) -> int:
        """Slots of any head, however a layer's budget is divided."""
        policy, num_heads = retain_policy(sequence), self._shape.num_kv_heads
        budgets = self._layer_budgets(sequence)
        kept = (policy.most_kept(sequence.plan, budget, num_heads) for budget in budgets)
        return max(kept, default=0) + self._room(sequence)

    def prompt_attention(self, sequence: Sequence) -> PromptAttention | None:
        return sequence.prompt_attention()

    def _layer_blocks(self, sequence: Sequence, layer: int) -> int:
        """Enough blocks however unequally a policy divides a layer's budget among its heads."""
        slots = self._layer_budgets(sequence)[layer] + self._room(sequence)
        return blocks_of_heads(self._shape.num_kv_heads, slots)

    def _layer_budgets(self, sequence: Sequence) -> list[int]:
        """Budgets of the layers that are compressed. Raises RequestError if the policy cannot serve the budget."""
        if sequence not in self._budgets:
            policy, plan, num_layers = retain_policy(sequence), sequence.plan, self.num_layers
            try:
                budgets = [policy.layer_budget(plan, layer, num_layers) for layer in range(num_layers)]
            except ValueError as error:
                raise RequestError(str(error), "carrel.budget") from error
            self._budgets[sequence] = budgets
        return self._budgets[sequence]

    def _room(self, sequence: Sequence) -> int:
        """Slots of each head for tokens decoded since it was last compressed."""
        begin = max(sequence.num_prefill, sequence.kept.at)
        return retain_policy(sequence).room(sequence.plan, sequence.capacity - begin)

    def needs_store(self, sequence: Sequence) -> bool:
        # Only to measure by: what is not kept is gone. Means of rows lie at no position, so they are not measured.
        return sequence.request.measure and sequence.plan.selects and not sequence.plan.has_means

    def admit(self, sequence: Sequence) -> None:
        self.kept.make_room(sequence.seat, self._most_slots(sequence), has_notes=False)
        for layer in range(self.num_layers):
            self.block_tables.reserve(sequence.seat, layer, self._layer_blocks(sequence, layer))
        # Most policies keep as many of every head: nothing is left to be divided while the prompt is computed.
        room = self._room(sequence)
        shares = [num_blocks(budget + room) for budget in self._layer_budgets(sequence)]
        self.block_tables.deal_evenly(sequence.seat, shares)

    def store(self, sequence: Sequence, layer: int, rows: Tensor, queries: Tensor) -> None:
        seed = sequence.request.sampling.seed or 0
        if self._positions is None or self._positions.shape[1] != rows.shape[1]:
            self._positions = prompt_positions(rows)
        prompt = LayerRows.of_prompt(
            layer, self.num_layers, rows, queries, self._shape.scale, seed, self._positions
        )
        sequence.kept.at = sequence.num_prefill
        self._keep(sequence, range(layer, layer + 1), self._compress(sequence, prompt))

    def _compress(self, sequence: Sequence, rows: LayerRows) -> Retained:
        policy, plan = retain_policy(sequence), sequence.plan
        try:
            return policy.compress(rows, plan, self._layer_budgets(sequence)[rows.layer])
        except torch.OutOfMemoryError as error:
            raise no_room_for_policy(policy.name, "compress", rows.num_tokens) from error

    def _keep(self, sequence: Sequence, layers: range, retained: Retained) -> None:
        """Put what is retained into the layers' slots; these are divided again if a head keeps more than before."""
        seat, room, policy = sequence.seat, self._room(sequence), retain_policy(sequence)
        counts = retained.counts_on_host()
        longest = max(counts)
        try:
            self.kept.make_room(seat, longest + room, retained.notes is not None)
        except CapacityError as error:
            raise CapacityError(
                f"no device memory is left for what policy {policy.name!r} knows of {longest + room} slots a head; "
                "ask for a smaller budget or fewer tokens, or start with fewer --max-num-seqs"
            ) from error
        if layers.start == 0:
            sequence.kept.longest = sequence.kept.total = 0
        sequence.kept.longest = max(sequence.kept.longest, longest)
        sequence.kept.total += sum(counts)
        is_final, num_heads = policy.recompression(sequence.plan) is None, self._shape.num_kv_heads
        for layer, first in zip(layers, range(0, len(counts), num_heads), strict=True):
            heads = slice(first, first + num_heads)
            self.block_tables.deal(
                seat, layer, [num_blocks(count + room) for count in counts[heads]], is_final
            )
            history = None if retained.history is None else retained.history[heads]
            sequence.kept.layers[layer] = KeptLayer(tuple(counts[heads]), room, retained.rounds, history)
        self._rows.write(seat, layers, retained, room)

    def advance(self, sequence: Sequence) -> None:
        """Move the window on for the next token; compress again when it is time."""
        policy, plan = retain_policy(sequence), sequence.plan
        sequence.window_begin = policy.window_begin(plan, sequence.num_tokens)
        again = policy.recompression(plan)
        if again is None:
            return
        num_decoded = sequence.num_tokens - sequence.kept.at
        if num_decoded >= again.interval:
            sequence.kept.at = sequence.num_tokens
            layers, step = range(self.num_layers), self._layers_at_once(sequence, again)
            for first in layers[::step]:
                together = layers[first : first + step]
                # No name holds the rows while others are written.
                self._keep(
                    sequence,
                    together,
                    self._compress(sequence, self._rows.read(sequence, together, num_decoded)),
                )
        sequence.mark = again.mark(sequence.kept.at + again.interval - sequence.num_tokens)

    def _layers_at_once(self, sequence: Sequence, again: Recompression) -> int:
        """How many layers may be compressed together while the sequence decodes. Their temporaries take no more memory
        than those of one prompt of the greatest length, which is reserved as float32."""
        if not again.together:
            return 1
        num_rows = sequence.kept.longest + again.interval
        return max(1, 4 * self._shape.max_model_len // (self._shape.dtype.itemsize * num_rows))

    def group_shape(
        self, sequences: list[Sequence], num_lanes: int, num_tokens: int, buckets: Buckets
    ) -> GroupShape:
        longest = max(
            sequence.kept.longest + sequence.num_tokens - sequence.kept.at + 1 for sequence in sequences
        )
        room = max(sequence.kept.longest + self._room(sequence) for sequence in sequences)
        num_positions = min(buckets.positions(min(longest, room)), self.kept.width)
        return GroupShape(sequences[0].policy.name, False, num_lanes, num_positions)

    def begin_step(self, group: Group) -> RetainStep:
        return RetainStep(group, retain_policy(group.sequences[0]), self._parts)

    def snapshot(self, sequence: Sequence, place: LanePlace, most: int) -> Snapshot:
        width = min(self.kept.width, sequence.kept.longest + sequence.num_tokens - sequence.kept.at)
        most = min(most, max(1, MAX_ELEMENTS // (self._shape.num_kv_heads * width)))
        kept = spread(range(self.num_layers), most)
        positions = torch.stack([self.kept.positions[sequence.seat, layer, :, :width] for layer in kept])
        # All that is kept is attended; the rest is forgotten.
        return Snapshot(tuple(kept), positions, positions)

    def count(self, sequences: list[Sequence]) -> None:
        num_layers = self.num_layers
        for sequence in sequences:
            meter = sequence.meter
            # Where every step evicts, the new token's slot is the only one in addition to what was kept.
            evicts = retain_policy(sequence).evicts
            grown = 0 if evicts else sequence.num_tokens - sequence.kept.at
            meter.num_layer_steps += num_layers
            meter.attended_tokens += sequence.kept.total / self._shape.num_kv_heads + num_layers * grown

    def release(self, sequence: Sequence) -> None:
        self.kept.free(sequence.seat)
        super().release(sequence)
