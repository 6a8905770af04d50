"""One decode step: one new token for every sequence of the batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from gpu_worker.caches import CacheSet, LayerSteps
from gpu_worker.errors import ArenaFull, StoreSilent, WorkerError, no_room, run_each
from gpu_worker.kernels.rows import store_token
from gpu_worker.models import Decoder
from gpu_worker.policies.base import StepQueries
from gpu_worker.records import Event
from gpu_worker.runner.steps.attention_views import AttentionViews
from gpu_worker.runner.steps.graphs import StepGraphs
from gpu_worker.state.batch import Batch, Group, join
from gpu_worker.state.lane_inputs import LaneInputs, fill_drawn
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool
from gpu_worker.store.host_rows import host_bytes
from gpu_worker.store.link import TrainedLayer
from gpu_worker.store.offload import Offloader


@dataclass(frozen=True, slots=True)
class StepResult:
    """Logits, float32 [B, vocab], of the sequences that finished the step, and the errors of those that did not.

    The logits are valid until the next step. Other sequences took no part and are unchanged; they can join a later
    step.

    short: the arena had no memory for them.
    crowded: there were no slots for them.
    silent: they need a store that is silent.
    indexing: with the indexes of tokens that leave their windows, all of which must be loaded first.
    """

    sequences: list[Sequence]
    logits: Tensor
    failed: list[tuple[Sequence, WorkerError]]
    short: list[tuple[Sequence, ArenaFull]] = field(default_factory=list)
    crowded: list[Sequence] = field(default_factory=list)
    silent: list[Sequence] = field(default_factory=list)
    indexing: list[tuple[Sequence, deque[TrainedLayer]]] = field(default_factory=list)
    events: list[tuple[str, Event]] = field(default_factory=list)


class DecodeStep:
    """Runs the model over the next tokens of any mix of lengths, policies and budgets.

    On a GPU a step is one CUDA graph, unless the host takes part: it fetches or stores rows, or something is
    measured; or `captures_graphs` is off.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: CacheSet,
        offloader: Offloader,
        pool: SlotPool,
        captures_graphs: bool = True,
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._offloader = offloader
        self._pool = pool
        self._device = pool.rows.device
        self._captures_graphs = captures_graphs and self._device.type == "cuda"
        self.graphs = StepGraphs(self._device)
        self.views = AttentionViews(caches, decoder.config.num_kv_heads)
        # Sees every step that ran, for measuring.
        self.watch: Callable[[StepResult], None] = lambda result: None

    def run(self, sequences: list[Sequence], drawn: Tensor | None = None) -> StepResult:
        """Advance every sequence by its `next_token`, of `drawn` where that names a place there. Raises
        StoreUnavailable if recalled rows cannot be had."""
        with self._offloader.meter.step():
            return self._run(sequences, drawn)

    def _run(self, sequences: list[Sequence], drawn: Tensor | None) -> StepResult:
        failed: list[tuple[Sequence, WorkerError]] = []
        short: list[tuple[Sequence, ArenaFull]] = []
        silent: list[Sequence] = []
        indexing: list[tuple[Sequence, deque[TrainedLayer]]] = []

        def advance(sequence: Sequence) -> None:
            try:
                if trained := self.advance(sequence):
                    indexing.append((sequence, trained))
            except StoreSilent:
                silent.append(sequence)

        # All before the first one advances: windows must not move before others' slots are given up.
        crowded = [sequence for sequence in sequences if not self._caches.grow(sequence)]
        sequences = run_each((one for one in sequences if one not in crowded), advance, failed, short)
        absent = {*silent, *(sequence for sequence, _ in indexing)}
        sequences = [sequence for sequence in sequences if sequence not in absent]
        # Last, since advancing may take long.
        sequences = self._who_may_write(sequences, failed)
        if not sequences:
            return StepResult([], torch.empty(0), failed, short, crowded, silent, indexing)
        batch = self._caches.batch(sequences)

        def complete(table: Tensor) -> None:
            if drawn is not None:
                fill_drawn(table, drawn)

        if self._is_capturable(batch):
            batch, state = self.graphs.fit(batch, self._caches.state), self._caches.state
            logits = self.graphs.run(batch, state, lambda table: self.forward(batch, table)[0], complete)
            new_rows = None
        else:
            table = torch.tensor(batch.table, device=self._device)
            complete(table)
            logits, new_rows = self.forward(batch, table)
        self._caches.count(batch)
        sequences = batch.sequences
        for sequence in sequences:
            sequence.num_tokens += 1
        events = self.views.after_step(batch)
        logits = batch.without_padding(logits)
        kept = run_each(sequences, self._offload(batch, new_rows), failed, short)
        if len(kept) < len(sequences):
            logits = logits[[sequences.index(sequence) for sequence in kept]]
        result = StepResult(kept, logits, failed, short, crowded, silent, indexing, events)
        self.watch(result)
        return result

    @torch.inference_mode()
    def prepare(self, sequences: list[Sequence], captures: bool = True) -> None:
        """Compile the step of a batch of sequences like these, which hold nothing, and capture it where steps are, if
        it `captures`. Nothing that running sequences have is changed. Raises CapacityError."""
        batch = self._caches.blank(sequences)
        # Without an arena the host fetches what is missed.
        host_fetches = self._offloader.arena.view is None and any(one.can_miss for one in sequences)
        try:
            if captures and self._captures_graphs and not host_fetches:
                self.graphs.prepare(batch, self._caches.state, lambda table: self.forward(batch, table)[0])
            else:
                self.forward(batch, torch.tensor(batch.table, device=self._device))
        except torch.OutOfMemoryError as error:
            raise no_room("the step", error) from error

    def advance(self, sequence: Sequence) -> deque[TrainedLayer] | None:
        """Reserve slots and arena memory for the next token. Returns the indexes of tokens that leave the window, where
        the store trains them: advance again once they are loaded. Raises ArenaFull and StoreSilent, after which this
        may be tried again, and CapacityError and StoreUnavailable, which end this sequence alone."""
        if sequence.offloads:
            try:
                self._offloader.extents.reserve(sequence, sequence.num_tokens + 1)
            except StoreSilent:
                if not self._goes_on_without_store(sequence):
                    raise
        try:
            return self._caches.advance(sequence)
        except torch.OutOfMemoryError as error:
            raise no_room(f"what policy {sequence.policy.name!r} does before a step", error) from error

    def _goes_on_without_store(self, sequence: Sequence) -> bool:
        """Let the sequence leave a silent store that it no longer needs; return whether it does."""
        if not self._offloader.client.silent_seconds or self._caches.needs_store_to_decode(sequence):
            return False
        self._offloader.extents.stop_offloading(sequence)
        return True

    def _who_may_write(
        self, sequences: list[Sequence], failed: list[tuple[Sequence, WorkerError]]
    ) -> list[Sequence]:
        """Once the lease is lost, the slabs that a step would write to may belong to others: sequences that need theirs
        end."""
        offloading = [sequence for sequence in sequences if sequence.offloads]
        try:
            if offloading:
                self._offloader.link.check()
            return sequences
        except WorkerError as error:
            failed += [(one, error) for one in offloading if not self._goes_on_without_store(one)]
            return [sequence for sequence in sequences if not sequence.offloads]

    def _is_capturable(self, batch: Batch) -> bool:
        if not self._captures_graphs:
            return False
        is_measured = any(sequence.request.measure for sequence in batch.sequences)
        return not (is_measured or self._host_stores(batch))

    def _host_stores(self, batch: Batch) -> bool:
        """Return whether new rows go to the store through the host."""
        return self._offloader.arena.view is None and any(sequence.offloads for sequence in batch.sequences)

    def forward(self, batch: Batch, table: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [B, vocab]; and the new rows of the layers that the arena keeps, [B, L, H_kv, 2d], where the host must
        store them."""
        decoder, rows = self._decoder, LaneInputs.of(table)
        hidden = decoder.embed(rows.token_ids)
        positions = rows.positions.clamp(min=0)
        arena = self._offloader.arena.view
        arena_bytes = None if arena is None else arena.bytes
        offsets = None if arena is None else arena.offsets(rows.seats, rows.positions)
        layers, by_cache = self._caches.layers, self._caches.begin_step(batch, table)
        before: Tensor | None = None
        for layer, (place, kept) in enumerate(zip(layers.places, layers.kept, strict=True)):
            steps = by_cache[place.cache]
            query, key, value = decoder.project_qkv(layer, hidden, positions)
            early = self._early_query(layer, before, positions, query)
            slots = steps.new_slots[:, place.index]
            if offsets is None or kept is None:
                store_token(key, value, self._pool.rows, slots, None, None)
            else:
                store_token(key, value, self._pool.rows, slots, arena_bytes, offsets[:, kept])
            attended = [
                step.attend(place.index, StepQueries(step.group.part_of(query), _part(step.group, early)))
                for step in steps.steps
            ]
            before, hidden = hidden, decoder.finish_layer(layer, hidden, join(attended))
        for steps in by_cache.values():
            for step in steps.steps:
                step.finish()
        new_rows = self._new_rows(by_cache) if self._host_stores(batch) else None
        return decoder.logits(hidden), new_rows

    def _early_query(
        self, layer: int, before: Tensor | None, positions: Tensor, query: Tensor
    ) -> Callable[[], Tensor]:
        """Project the layer's query as if the layer before it, with the input `before`, changed nothing: once, if it is
        asked for."""
        if before is None:
            return lambda: query
        return cache(lambda: self._decoder.project_qkv(layer, before, positions)[0])

    def _new_rows(self, by_cache: dict[str, LayerSteps]) -> Tensor:
        layers = self._caches.layers
        kept = [place for place, number in zip(layers.places, layers.kept, strict=True) if number is not None]
        slots = torch.stack([by_cache[place.cache].new_slots[:, place.index] for place in kept], dim=1)
        return self._pool.rows[slots.clamp(min=0).long()]

    def _offload(self, batch: Batch, new_rows: Tensor | None) -> Callable[[Sequence], None]:
        """Sends a sequence's new token to the store; without `new_rows` the device writes it to the arena itself."""
        if new_rows is None:
            return self._note_written
        data = host_bytes(batch.without_padding(new_rows))
        places = {sequence: place for place, sequence in enumerate(batch.sequences)}

        def offload(sequence: Sequence) -> None:
            if sequence.offloads:
                self._offloader.store_token(sequence, sequence.num_tokens - 1, data[places[sequence]])

        return offload

    def _note_written(self, sequence: Sequence) -> None:
        if sequence.offloads:
            self._offloader.note_written(sequence, sequence.num_tokens)


def _part(group: Group, query: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: group.part_of(query())
