"""One prompt's rows of the layer that is computed, and the way of finished layers to its cache, arena and index."""

from __future__ import annotations

from collections import deque
from concurrent import futures
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from gpu_worker.caches import Cache, ServedLayer
from gpu_worker.device import Mark
from gpu_worker.errors import PrefixLost, no_room
from gpu_worker.policies.base import PromptAttention
from gpu_worker.policies.recall import IndexJob
from gpu_worker.row_format import keys_and_values
from gpu_worker.runner.prompts.base import Prompt
from gpu_worker.runner.prompts.prompt_memory import FEW_TOKENS
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.offload import Offloader
from kv_store.client import StoreError

# How long a prompt that is computed waits for its proof before others are looked after.
POLL_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class _Computed:
    """A computed layer of the model on its way to the arena, where it is at `copied`, and the time that computing it
    took: between two marks, decode steps between its chunks included."""

    layer: int
    copied: Mark
    begun: Mark
    ended: Mark


class PromptRows(Prompt):
    """Holds what is the prompt's own while a `Prefill` computes it, alone or with others.

    Of a layer that is computed: the rows of all tokens, [H_kv, n, 2d], in two buffers in turn where one is copied to
    the arena while the next is computed; and as many of the last tokens' queries as the policy reads. Of a known prefix
    few rows that follow go to the arena once all layers are computed, unless an index is trained there. `cancel` those
    of a prompt that is not done.
    """

    def __init__(
        self,
        sequence: Sequence,
        layers: list[ServedLayer],
        offloader: Offloader,
        buffers: list[Tensor],
        num_heads: int,
        begin: int,
        share: float,
    ) -> None:
        """buffers: its own parts. begin: of its tokens among those that are computed together. share: of these."""
        super().__init__(sequence, offloader, share)
        self.begin, self.end = begin, begin + self.num_tokens - self.first
        self._layers = layers
        caches = dict.fromkeys(one.cache for one in layers)
        # One of each cache: it may know what it was asked before.
        self._attention: dict[Cache, PromptAttention | None] = {
            cache: cache.prompt_attention(sequence) for cache in caches
        }
        self._buffers = buffers
        asked = sequence.policy.num_queries(sequence.plan) if sequence.plan.selects else 0
        head_dim = keys_and_values(buffers[0])[0].shape[2]
        self.queries = buffers[0].new_empty(min(asked, self.num_tokens), num_heads, head_dim)
        # When the rows in each buffer are in the arena.
        self._copied: list[Mark | None] = [None] * len(buffers)
        # Known rows of the next layer on their way.
        self._loading: Mark | None = None
        self._num_layers = 0
        # Tokens of the next layer that are computed.
        self._num_passed = 0
        self._computed: deque[_Computed] = deque()
        # When the layers were computed that are not on their way yet, and their computed rows, where these are few.
        self._times: list[tuple[Mark, Mark]] = []
        self._few: Tensor | None = None
        num_new, is_alone = self.num_tokens - self.first, share == 1.0
        if self.first and is_alone and num_new <= FEW_TOKENS and not any(map(self._job, range(len(layers)))):
            num_kv_heads, _, row = buffers[0].shape
            self._few = buffers[0].new_empty(len(layers), num_kv_heads, num_new, row)
        # The check of the known rows in the arena against their checksums. An offloading sequence starts it at once,
        # since it reads them while it decodes; others start it with their first read, which may be never.
        self._verified: futures.Future[int] | None = None
        self._is_proving = False
        if self.first and sequence.offloads:
            self._prove()

    @property
    def rows(self) -> Tensor:
        """The buffer of the layer that is computed."""
        return self._buffers[self._num_layers % len(self._buffers)]

    @property
    def is_copying(self) -> bool:
        return bool(self._computed) or self._verified is not None

    @property
    def computed_tokens(self) -> int:
        return (self._num_layers * (self.end - self.begin) + self._num_passed) // len(self._layers)

    def attention(self, layer: int) -> PromptAttention | None:
        """How a layer is attended; None: densely."""
        return self._attention[self._layers[layer].cache]

    def take_known(self) -> None:
        """The rows of a known prefix, of this layer; those of the next are on their way while this one is computed.
        Raises StoreUnavailable, PrefixLost where the prompt must be computed anew, and StoreSilent as `take_copied`
        does."""
        if not self.first:
            return
        layer, loading, self._loading = self._num_layers, self._loading, None
        if loading is None and not self._loads_resident(layer):
            loading = self._load(layer)
        if loading is not None:
            loading.hold()
        has_next = len(self._buffers) > 1 and layer + 1 < len(self._layers)
        resident = self.sequence.resident
        if has_next and not (resident is not None and resident.is_there(layer + 1)):
            self._loading = self._load(layer + 1)

    def _loads_resident(self, layer: int) -> bool:
        """Load the known rows from slots that still hold them; return whether there are any."""
        resident = self.sequence.resident
        return resident is not None and resident.load(layer, self.rows[:, : self.first])

    def _load(self, layer: int) -> Mark:
        """From the arena, which keeps every layer of a prompt that it knows."""
        kept = self._layers[layer].kept
        assert kept is not None, f"layer {layer} of a known prefix is not kept"
        self._prove()
        place = layer % len(self._buffers)
        return self._offloader.load_layer(self.sequence, kept, self._buffers[place], self._copied[place])

    def _prove(self) -> None:
        """Have the known rows in the arena compared with their checksums, once."""
        if not self._is_proving:
            self._is_proving, self._verified = True, self._offloader.verify(self.sequence)

    def positions(self, begin: int, end: int) -> range:
        """Return the positions of its tokens among those at [begin, end) of all that are computed together."""
        ahead = self.begin - self.first
        return range(max(begin, self.begin) - ahead, max(begin, self.begin, min(end, self.end)) - ahead)

    def pass_chunk(self, query: Tensor, begin: int) -> None:
        """Keep what the policy reads of a chunk's queries [T, H_q, d], some of which may be other prompts'. begin: of
        the first one's token among all that are computed together."""
        positions = self.positions(begin, begin + query.shape[0])
        self._num_passed += len(positions)
        first_kept = self.num_tokens - self.queries.shape[0]
        if kept := positions[max(0, first_kept - positions.start) :]:
            place = kept.start + self.begin - self.first - begin
            self.queries[kept.start - first_kept : kept.stop - first_kept] = query[place : place + len(kept)]

    def finish_layer(self, begun: Mark, ended: Mark) -> None:
        """Store the layer that was computed between two marks. Raises what caches raise, CapacityError and
        StoreUnavailable; then the prompt is to be cancelled."""
        try:
            self._finish_layer(begun, ended)
        except torch.OutOfMemoryError as error:
            raise no_room("the prompt", error) from error

    def _finish_layer(self, begun: Mark, ended: Mark) -> None:
        sequence, layer, rows = self.sequence, self._num_layers, self.rows
        self._times.append((begun, ended))
        if self._few is None:
            self._put(range(layer, layer + 1), rows[None])
        else:
            self._few[layer].copy_(rows[:, self.first :])
            if layer + 1 == len(self._layers):
                self._put(range(layer + 1), self._few, self.first)
        served = self._layers[layer]
        served.cache.store(sequence, served.index, rows, self.queries.transpose(0, 1))
        self._leave(layer, rows)
        self._num_layers, self._num_passed = layer + 1, 0
        if (copied := self._copied[self._num_layers % len(self._buffers)]) is not None:
            # The next layer's rows take the place of these.
            copied.hold()

    def _leave(self, layer: int, rows: Tensor) -> None:
        """Rows of a compressed prompt, in slots where others may find them."""
        left = self.sequence.left
        if left is None:
            return
        if self._few is None or left.begin < self.first:
            left.put(range(layer, layer + 1), rows[None])
        elif layer + 1 == len(self._layers):
            left.put(range(layer + 1), self._few, self.first)

    def _put(self, layers: range, rows: Tensor, begin: int = 0) -> None:
        """Start to copy computed layers to the arena, [L, H_kv, n, 2d] from the position `begin` on: one layer of the
        model, or all, of a known prompt, which are all kept."""
        times, self._times = self._times, []
        kept = [number for layer in layers if (number := self._layers[layer].kept) is not None]
        if not kept:
            return
        in_arena = range(kept[0], kept[-1] + 1)
        if (put := self._offloader.store_layers(self.sequence, in_arena, rows, begin)) is not None:
            for layer, (begun, ended) in zip(layers, times, strict=True):
                self._computed.append(_Computed(layer, put, begun, ended))
            self._copied[layers[-1] % len(self._buffers)] = put

    def take_copied(self) -> None:
        """Seal the layers that are in the arena by now, and request their indexes; layers without one wait for the
        last, which saves calls, and that one until known rows are proven: then others find what follows on them. Raises
        PrefixLost where they are not what was written."""
        self._take_verified()
        copied = list(takewhile(lambda computed: computed.copied.is_reached, self._computed))
        if self._verified is not None and copied and copied[-1].layer == len(self._layers) - 1:
            copied.pop()
        sequence, jobs = self.sequence, [self._job(computed.layer) for computed in copied]
        is_last = self._num_layers == len(self._layers) and len(copied) == len(self._computed)
        if sequence.offloads and not (is_last or any(jobs)):
            return
        if copied and sequence.offloads:
            in_arena = range(self._kept(copied[0]), self._kept(copied[-1]) + 1)
            # They stay until the store has answered.
            self._offloader.seal_layers(sequence, in_arena, self.num_tokens)
        for computed, job in zip(copied, jobs, strict=True):
            self._computed.popleft()
            if all(left.copied is not computed.copied for left in self._computed):
                self._note_copied(computed.copied)
            if job is not None:
                # Prompts that are computed together have their indexes trained together.
                seconds = self.share * computed.ended.seconds_since(computed.begun)
                kept = self._kept(computed)
                self.trained.append(self._offloader.link.build_index(sequence, kept, job, seconds))

    def _take_verified(self) -> None:
        if self._verified is None or not self._verified.done():
            return
        verified, self._verified = self._verified, None
        try:
            num_corrupt = verified.result()
        except StoreError as error:
            raise self._lost(f"a prefix could not be verified: {error}") from error
        if num_corrupt:
            raise self._lost(f"{num_corrupt} slabs of a prefix were corrupt")

    def _lost(self, text: str) -> PrefixLost:
        self.sequence.trusts_prefixes = False
        return PrefixLost(text)

    def _job(self, layer: int) -> IndexJob | None:
        served = self._layers[layer]
        return served.cache.prompt_job(self.sequence, served.index) if self.sequence.offloads else None

    def _kept(self, computed: _Computed) -> int:
        """The arena's number of a layer that goes there."""
        kept = self._layers[computed.layer].kept
        assert kept is not None, f"layer {computed.layer} is not kept"
        return kept

    def wait(self) -> None:
        for computed in self._computed:
            if not computed.copied.is_reached:
                computed.copied.wait()
                return
        if self._verified is not None:
            futures.wait([self._verified], POLL_SECONDS)

    def cancel(self) -> None:
        for computed in self._computed:
            computed.copied.wait()
        self._computed.clear()
        if self._loading is not None:
            self._loading.wait()
