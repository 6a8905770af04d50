"""Layers on their way to the arena while the next are computed: what waits for what."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from engine_rig import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, make_model
from offload_rig import make_sequence
from torch import Tensor

from gpu_worker.caches import Cache, ServedLayer
from gpu_worker.caches.recall.index_training import prompt_job
from gpu_worker.device import Mark
from gpu_worker.errors import PrefixLost, StoreUnavailable
from gpu_worker.policies.recall import IndexJob
from gpu_worker.runner.prompts.layered import Prefill
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.link import TrainedLayer
from gpu_worker.store.offload import Offloader

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


class SlowOffloader(Offloader):
    """Copies that take until their marks are reached; notes what it is asked."""

    def __init__(self) -> None:
        self.marks: list[SlowMark] = []
        self._by_layer: dict[tuple[str, int], SlowMark] = {}
        self.rows: list[Tensor] = []
        self.sealed: list[int] = []
        self.seconds: list[float] = []
        self.fails_at = -1
        self.arena = SimpleNamespace(copies_aside=True)  # type: ignore[assignment]
        # It is asked for extents and indexes itself.
        self.extents = self.link = self  # type: ignore[assignment]
        # Layers whose known rows were asked for, each with those computed by then.
        self.loaded: list[tuple[int, int]] = []
        self.loading: list[SlowMark] = []
        self.verified: Future[int] | None = None

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.offloads

    def load_layer(self, sequence: Sequence, layer: int, rows: Tensor, free: Mark | None = None) -> Mark:
        # The layer before the last one had the same rows.
        assert free is (self.marks[layer - 2] if layer >= 2 else None)
        rows[:, : sequence.num_cached] = layer
        self.loaded.append((layer, len(self.marks)))
        self.loading.append(SlowMark())
        return self.loading[-1]

    def verify(self, sequence: Sequence) -> Future[int] | None:
        return self.verified

    def store_layers(self, sequence: Sequence, layers: range, rows: Tensor, begin: int = 0) -> Mark | None:
        if sequence not in self:
            return None
        assert begin in (0, sequence.num_cached)
        if self.fails_at in layers:
            raise StoreUnavailable("gone")
        if rows.is_cuda:
            # A mark of these says nothing of the device.
            torch.cuda.synchronize()
        self.marks.append(SlowMark())
        for layer, of_layer in zip(layers, rows, strict=True):
            self._by_layer[sequence.sequence_id, layer] = self.marks[-1]
            self.rows.append(of_layer)
        return self.marks[-1]

    def seal_layers(self, sequence: Sequence, layers: range, num_tokens: int) -> None:
        assert all(self._by_layer[sequence.sequence_id, layer].is_reached for layer in layers)
        self.sealed += layers

    def seal_copy(self, sequence: Sequence) -> None:
        """Do nothing: there are no copies."""

    def build_index(
        self, sequence: Sequence, layer: int, job: IndexJob, prefill_seconds: float = 0.0
    ) -> TrainedLayer:
        assert layer in self.sealed
        self.seconds.append(prefill_seconds)
        return TrainedLayer(layer, job, None)  # type: ignore[arg-type]


class NoCache:
    """Takes the rows of a layer as a cache does, and keeps them."""

    is_dense = True

    def __init__(self) -> None:
        self.stored: list[Tensor] = []

    def store(self, sequence: Sequence, layer: int, rows: Tensor, queries: Tensor) -> None:
        self.stored.append(rows.clone())

    def store_layers(self, sequence: Sequence, rows: Tensor) -> None:
        self.stored += rows.clone()

    def prompt_attention(self, sequence: Sequence) -> None:
        return None

    def prompt_job(self, sequence: Sequence, layer: int) -> IndexJob | None:
        return prompt_job(sequence)

    def layers(self) -> list[ServedLayer]:
        """It serves all of them."""
        return [ServedLayer(cast(Cache, self), layer, layer) for layer in range(NUM_LAYERS)]


def make_prefill(offloader: Offloader, offloads: bool = True, num_cached: int = 0) -> tuple[Prefill, NoCache]:
    prefill, [cache] = make_packed(offloader, NUM_TOKENS, offloads=offloads, num_cached=num_cached)
    return prefill, cache


def make_packed(
    offloader: Offloader, *lengths: int, offloads: bool = True, num_cached: int = 0
) -> tuple[Prefill, list[NoCache]]:
    sequences = [make_sequence(f"{seat}", seat, num_tokens) for seat, num_tokens in enumerate(lengths)]
    for sequence in sequences:
        sequence.offloads = offloads
        sequence.num_cached = num_cached
    caches = [NoCache() for _ in lengths]
    layers = [cache.layers() for cache in caches]
    return Prefill(sequences, make_model().decoder, layers, offloader, CHUNK, MAX_TOKENS), caches


def layers_on(prefill: Prefill, num_layers: int) -> None:
    for _ in range(num_layers * NUM_CHUNKS):
        prefill.advance()


def logits_of(prefill: Prefill) -> Tensor:
    while not prefill.is_done:
        prefill.advance()
    taken = prefill.take_logits()
    assert taken is not None
    return taken[1]


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
    assert [trained.layer for trained in prefill.prompts[0].trained] == [0]
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
    [prompt] = prefill.prompts
    assert (prompt.computed_tokens, prompt.left_tokens) == (NUM_TOKENS, 0)
    assert prompt.sequence.num_tokens == 0
    most = NUM_LAYERS
    while not prefill.is_done:
        prefill.advance()
        most -= 1
    assert most >= 0
    assert offloader.sealed == list(range(NUM_LAYERS))
    assert len(prompt.trained) == NUM_LAYERS
    assert prompt.sequence.num_tokens == NUM_TOKENS


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
    assert torch.equal(logits_of(slow), logits_of(plain))


@torch.inference_mode()
@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_prefill_leaves_no_copy_behind(fails: bool) -> None:
    offloader = SlowOffloader()
    prefill, _ = make_prefill(offloader)
    offloader.fails_at = 2 if fails else -1
    sequence = prefill.prompts[0].sequence
    layers_on(prefill, 2)
    if fails:
        failed = [prefill.advance() for _ in range(NUM_CHUNKS)]
        assert failed[:-1] == [[], []]
        [(who, error)] = failed[-1]
        assert who is sequence
        assert isinstance(error, StoreUnavailable)
    else:
        prefill.cancel(sequence)
    assert [mark.reached for mark in offloader.marks] == [True, True]
    assert offloader.sealed == []
    prefill.cancel(sequence)


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
    prefill.cancel(prefill.prompts[0].sequence)
    assert offloader.loading[-1].reached


@torch.inference_mode()
@pytest.mark.parametrize("num_corrupt", [0, 2])
def test_nobody_finds_what_follows_on_known_rows_until_they_are_proven(num_corrupt: int) -> None:
    offloader = SlowOffloader()
    offloader.verified = Future()
    prefill, _ = make_prefill(offloader, num_cached=32)
    for _ in range(NUM_LAYERS):
        prefill.advance()
        offloader.marks[-1].reached = True
    assert prefill.advance() == []
    assert not prefill.is_done
    assert offloader.sealed == list(range(NUM_LAYERS - 1))
    offloader.verified.set_result(num_corrupt)
    failed = prefill.advance()
    if num_corrupt:
        [(sequence, error)] = failed
        assert isinstance(error, PrefixLost)
        assert not sequence.trusts_prefixes
    else:
        assert failed == []
        assert prefill.is_done
    assert len(offloader.sealed) == (NUM_LAYERS - 1 if num_corrupt else NUM_LAYERS)


@torch.inference_mode()
def test_packed_prompts_have_the_rows_that_each_has_alone() -> None:
    packed, caches = make_packed(SlowOffloader(), 7, 10, 3)
    for _ in range(NUM_LAYERS):
        assert packed.advance() == []
    logits = logits_of(packed)
    for row, (num_tokens, cache) in enumerate(zip((7, 10, 3), caches, strict=True)):
        alone, [expected] = make_packed(SlowOffloader(), num_tokens)
        layers_on(alone, NUM_LAYERS)
        for stored, own in zip(cache.stored, expected.stored, strict=True):
            torch.testing.assert_close(stored, own)
        torch.testing.assert_close(logits[row], logits_of(alone)[0])


@torch.inference_mode()
def test_a_packed_prompt_is_done_when_its_own_copies_are_there() -> None:
    offloader = SlowOffloader()
    prefill, _ = make_packed(offloader, 7, 10)
    sequences = [prompt.sequence for prompt in prefill.prompts]
    for _ in range(NUM_LAYERS):
        prefill.advance()
    # The first one's of every layer, then the second one's.
    for mark in offloader.marks[::2]:
        mark.reached = True
    prefill.advance()
    assert not prefill.is_done
    assert [sequence.num_tokens for sequence in sequences] == [7, 0]
    [first] = prefill.done
    assert first.sequence is sequences[0]
    prefill.leave(first)
    while not prefill.is_done:
        prefill.advance()
    assert [sequence.num_tokens for sequence in sequences] == [7, 10]


@torch.inference_mode()
def test_the_time_of_a_layer_is_shared_by_who_was_computed_in_it() -> None:
    """The store bounds an index's training by it, and trains those of all."""
    offloader = SlowOffloader()
    prefill, _ = make_packed(offloader, 15, 5)
    while not prefill.is_done:
        prefill.advance()
    long, short = sum(offloader.seconds[::2]), sum(offloader.seconds[1::2])
    assert long / short == pytest.approx(3)


@torch.inference_mode()
def test_a_packed_prompt_that_is_cancelled_is_stored_no_more_and_its_copies_are_waited_for() -> None:
    offloader = SlowOffloader()
    prefill, caches = make_packed(offloader, 7, 10)
    first, second = (prompt.sequence for prompt in prefill.prompts)
    prefill.advance()
    prefill.cancel(first)
    assert [mark.reached for mark in offloader.marks] == [True, False]
    while not prefill.is_done:
        prefill.advance()
    assert [len(cache.stored) for cache in caches] == [1, NUM_LAYERS]
    assert (first.num_tokens, second.num_tokens) == (0, 10)
    assert logits_of(prefill).shape[0] == 1
