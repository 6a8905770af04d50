"""Layers on their way to the arena while the next are computed: what waits for what."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from engine_rig import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, make_model
from offload_rig import make_sequence
from torch import Tensor

from gpu_worker.caches import Cache
from gpu_worker.caches.recall.index_training import prompt_job
from gpu_worker.device import Mark
from gpu_worker.engine.prefill import Prefill
from gpu_worker.errors import StoreUnavailable
from gpu_worker.policies.recall import IndexJob
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.layer_writer import PendingLayer
from gpu_worker.store.offload import Offloader, TrainedLayer
from gpu_worker.store.prompt_copies import PromptCopies

CPU = torch.device("cpu")
NUM_TOKENS, CHUNK, MAX_TOKENS = 50, 20, 64
NUM_CHUNKS = 3


class SlowMark(Mark):
    """Reached when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.reached = False
        self.num_held = 0

    @property
    def is_reached(self) -> bool:
        return self.reached

    def wait(self) -> None:
        self.reached = True

    def hold(self) -> None:
        self.num_held += 1


# Of no prompt, so that nothing behind it is asked.
NO_COPIES = PromptCopies(None, None, None, None, {}, CPU)  # type: ignore[arg-type]


class SlowOffloader(Offloader):
    """Copies that take until their marks are reached; notes what it is asked."""

    copies_aside = True  # type: ignore[assignment]

    def __init__(self) -> None:
        self.marks: list[SlowMark] = []
        self.rows: list[Tensor] = []
        self.sealed: list[int] = []
        self.seconds: list[float] = []
        self.fails_at = -1
        self.copies = NO_COPIES
        # Layers whose known rows were asked for, each with those computed by then.
        self.loaded: list[tuple[int, int]] = []
        self.loading: list[SlowMark] = []

    def holds(self, sequence: Sequence) -> bool:
        return True

    def load_layer(self, sequence: Sequence, layer: int, rows: Tensor, free: Mark | None = None) -> Mark:
        # The layer before the last one had the same rows.
        assert free is (self.marks[layer - 2] if layer >= 2 else None)
        rows[:, : sequence.num_cached] = layer
        self.loaded.append((layer, len(self.marks)))
        self.loading.append(SlowMark())
        return self.loading[-1]

    def put_layer(self, sequence: Sequence, layer: int, rows: Tensor) -> PendingLayer:
        if layer == self.fails_at:
            raise StoreUnavailable("gone")
        self.marks.append(SlowMark())
        self.rows.append(rows)
        return PendingLayer(layer, self.marks[-1])

    def seal_layers(self, sequence: Sequence, layers: range, num_tokens: int) -> None:
        assert all(self.marks[layer].is_reached for layer in layers)
        self.sealed += layers

    def build(  # type: ignore[override]
        self, sequence: Sequence, layer: int, job: IndexJob, prefill_seconds: float = 0.0
    ) -> TrainedLayer:
        assert layer in self.sealed
        self.seconds.append(prefill_seconds)
        return TrainedLayer(layer, job, None)  # type: ignore[arg-type]


class NoCache:
    """Takes the rows of a layer as a cache does, and keeps them."""

    def __init__(self) -> None:
        self.stored: list[Tensor] = []

    def store(self, sequence: Sequence, layer: int, rows: Tensor, queries: Tensor) -> None:
        self.stored.append(rows.clone())

    def prompt_job(self, sequence: Sequence, layer: int) -> IndexJob | None:
        return prompt_job(sequence)


def make_prefill(offloader: Offloader, offloads: bool = True, num_cached: int = 0) -> tuple[Prefill, NoCache]:
    sequence, cache = make_sequence("a", 0, NUM_TOKENS), NoCache()
    sequence.num_cached = num_cached
    sequence.offloads = offloads
    caches = cast(list[Cache], [cache] * NUM_LAYERS)
    return Prefill(sequence, make_model().decoder, caches, offloader, CHUNK, MAX_TOKENS), cache


def layers_on(prefill: Prefill, num_layers: int) -> None:
    for _ in range(num_layers * NUM_CHUNKS):
        prefill.advance()


@torch.inference_mode()
def test_heads_lie_as_far_apart_whatever_the_prompt() -> None:
    """Attention is planned anew for every distance."""
    offloader = SlowOffloader()
    prefill, _ = make_prefill(offloader)
    layers_on(prefill, 1)
    assert offloader.rows[0].shape[1] == NUM_TOKENS
    assert offloader.rows[0].stride(0) == MAX_TOKENS * offloader.rows[0].shape[2]


@torch.inference_mode()
def test_a_layer_is_sealed_and_indexed_at_the_first_quantum_after_its_copy() -> None:
    offloader = SlowOffloader()
    prefill, _ = make_prefill(offloader)
    layers_on(prefill, 1)
    prefill.advance()
    assert offloader.sealed == []
    offloader.marks[0].reached = True
    prefill.advance()
    assert offloader.sealed == [0]
    assert [trained.layer for trained in prefill.trained] == [0]
    assert offloader.seconds[0] > 0
    prefill.advance()
    assert len(offloader.marks) == 2
    offloader.marks[1].reached = True
    layers_on(prefill, 1)
    assert offloader.sealed == [0, 1]


@torch.inference_mode()
def test_the_last_quantum_waits_for_the_copies_that_are_left() -> None:
    offloader = SlowOffloader()
    prefill, _ = make_prefill(offloader)
    layers_on(prefill, NUM_LAYERS)
    assert not prefill.is_done
    assert (prefill.computed_tokens, prefill.left_tokens) == (NUM_TOKENS, 0)
    assert prefill.sequence.num_tokens == 0
    most = NUM_LAYERS
    while not prefill.is_done:
        prefill.advance()
        most -= 1
    assert most >= 0
    assert offloader.sealed == list(range(NUM_LAYERS))
    assert len(prefill.trained) == NUM_LAYERS
    assert prefill.sequence.num_tokens == NUM_TOKENS


@torch.inference_mode()
def test_rows_are_overwritten_only_after_their_copy() -> None:
    offloader = SlowOffloader()
    prefill, _ = make_prefill(offloader)
    layers_on(prefill, 1)
    assert offloader.marks[0].num_held == 0
    layers_on(prefill, 1)
    # The third layer's rows come where the first one's are.
    assert offloader.marks[0].num_held == 1
    assert offloader.marks[1].num_held == 0
    layers_on(prefill, 1)
    first, second, third = (rows.data_ptr() for rows in offloader.rows)
    assert first == third != second


@torch.inference_mode()
def test_both_buffers_give_what_one_gives() -> None:
    slow, cache = make_prefill(SlowOffloader())
    plain, expected = make_prefill(SlowOffloader(), offloads=False)
    layers_on(slow, NUM_LAYERS)
    layers_on(plain, NUM_LAYERS)
    assert plain.is_done
    for rows, other in zip(cache.stored, expected.stored, strict=True):
        assert rows.shape == (NUM_KV_HEADS, NUM_TOKENS, 2 * HEAD_DIM)
        assert torch.equal(rows, other)
    assert torch.equal(slow.logits(), plain.logits())


@torch.inference_mode()
@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_prefill_leaves_no_copy_behind(fails: bool) -> None:
    offloader = SlowOffloader()
    prefill, _ = make_prefill(offloader)
    offloader.fails_at = 2 if fails else -1
    layers_on(prefill, 2)
    if fails:
        with pytest.raises(StoreUnavailable):
            layers_on(prefill, 1)
    prefill.cancel()
    assert [mark.reached for mark in offloader.marks] == [True, True]
    assert offloader.sealed == []
    prefill.cancel()


@torch.inference_mode()
def test_known_rows_of_the_next_layer_are_on_their_way_while_one_is_computed() -> None:
    offloader = SlowOffloader()
    prefill, cache = make_prefill(offloader, num_cached=32)
    prefill.advance()
    # Two layers of 18 tokens would be more than a chunk.
    assert offloader.loaded == [(0, 0), (1, 0)]
    assert [mark.num_held for mark in offloader.loading] == [1, 0]
    prefill.advance()
    assert offloader.loaded[2:] == [(2, 1)]
    prefill.advance()
    assert [layer for layer, _ in offloader.loaded] == list(range(NUM_LAYERS))
    assert [mark.num_held for mark in offloader.loading] == [1] * NUM_LAYERS
    assert [int(rows[0, 0, 0]) for rows in cache.stored] == list(range(NUM_LAYERS))
    prefill, _ = make_prefill(offloader, num_cached=32)
    prefill.advance()
    prefill.cancel()
    assert offloader.loading[-1].reached
