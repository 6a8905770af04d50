"""Training of recall indexes: on the store's cores, on the model's device, or on one after the other."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import torch
from torch import Tensor

from gpu_worker.caches.recall.fixed_slots import FixedSlots
from gpu_worker.caches.whole_context import WholeContext
from gpu_worker.device import to_device
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.recall import IndexJob, PrefilledLayer, ReadKeys, RecallPolicy, TrainedSegment
from gpu_worker.records import IndexDevice
from gpu_worker.row_format import keys_and_values
from gpu_worker.state.seat_memory import SeatMemory, seated_state
from gpu_worker.state.sequence import Sequence
from gpu_worker.state.slot_pool import SlotPool
from gpu_worker.store.link import TrainedLayer
from gpu_worker.store.offload import Offloader

# Keys of tokens that leave the window, of some layers, which are indexed at once.
WINDOW_BYTES = 64 << 20
# The last layer of a prompt is computed for one token only: nothing hides the training of its index, nor of the one
# before, and too little that of the one before these, as the store takes about as long as a layer.
UNHIDDEN_LAYERS = 3


def recall_policy(sequence: Sequence) -> RecallPolicy:
    """The policy of a sequence that the recall cache serves; CacheSet gives it no other."""
    return cast(RecallPolicy, sequence.policy)


def prompt_job(sequence: Sequence) -> IndexJob | None:
    """The index that a prefilled layer needs: of all tokens between sinks and window."""
    plan = sequence.plan
    return recall_policy(sequence).prompt_job(plan, plan.num_sink, sequence.window_begin)


class PolicyIndexes:
    """Each policy's index of all seats, with addresses from its first request on."""

    def __init__(self, shape: CacheShape, pool: SlotPool) -> None:
        self._shape = shape
        self._pool = pool
        self._indexes: dict[str, tuple[Any, SeatMemory]] = {}

    def of(self, policy: RecallPolicy) -> Any:
        """Return the policy's index."""
        return self._found(policy)[0]

    def memory(self, policy: RecallPolicy) -> SeatMemory:
        """Return what is behind the policy's index."""
        return self._found(policy)[1]

    def num_held_pages(self, seat: int) -> int:
        return sum(memory.num_held_pages(seat) for _, memory in self._indexes.values())

    def free(self, seat: int) -> None:
        """Free a seat's index; nothing where it has none."""
        for _, memory in self._indexes.values():
            memory.free(seat)

    def _found(self, policy: RecallPolicy) -> tuple[Any, SeatMemory]:
        if policy.name not in self._indexes:
            self._indexes[policy.name] = seated_state(self._pool, self._shape, policy.allocate)
        return self._indexes[policy.name]


class IndexTraining:
    """Has layers indexed, and loads what was trained into the policies' indexes.

    index_device: where. With AUTO a GPU trains what the second token would wait for (`IndexJob.is_quick`): all layers,
    or the last ones where the store's time is bounded. If it has every row, the store trains only the coarse part of
    the others (`IndexJob.coarse`).
    """

    def __init__(
        self,
        shape: CacheShape,
        pool: SlotPool,
        offloader: Offloader,
        indexes: PolicyIndexes,
        whole: WholeContext,
        fixed: FixedSlots,
        index_device: IndexDevice,
        kept: tuple[int, ...],
    ) -> None:
        """kept: the arena's number of each layer."""
        self._shape = shape
        self._kept = kept
        self._pool = pool
        self._offloader = offloader
        self._indexes = indexes
        self._whole = whole
        self._fixed = fixed
        self.trains_all = index_device is IndexDevice.GPU
        self._helps = (
            index_device is IndexDevice.AUTO
            and is_quick(shape.device)
            and not offloader.client.selects_in_store
        )

    def observe(self, sequence: Sequence, layer: int, rows: Tensor, queries: Tensor) -> None:
        """Let the policy see a prefilled layer, rows [H_kv, n, 2d]; train its index if that is done here."""
        if self._offloader.client.selects_in_store:
            return
        policy, (keys, values) = recall_policy(sequence), keys_and_values(rows)
        prefilled = PrefilledLayer(sequence.seat, layer, sequence.plan, keys, values, queries)
        policy.observe_prefill(self._indexes.of(policy), prefilled)
        job = prompt_job(sequence)
        if job is not None and self._is_trained_here(job, layer):
            self._train_here(sequence, range(layer, layer + 1), job, keys[:, job.begin : job.end])

    def job(self, sequence: Sequence, layer: int) -> IndexJob | None:
        """The job for the store on a prefilled layer; None: nothing."""
        if not sequence.plan.selects:
            return None
        if self._offloader.client.selects_in_store:
            plan = sequence.plan
            return recall_policy(sequence).store_job(plan, plan.num_sink, sequence.window_begin)
        job = prompt_job(sequence)
        if job is None or self._is_trained_here(job, layer):
            return None
        return job.coarsened() if self._helps and not sequence.can_miss else job

    def load(self, sequence: Sequence, trained: TrainedLayer, timeout_seconds: float) -> bool:
        """Load a trained index if it is ready within the time. Raises StoreUnavailable when none will come."""
        segment = self._offloader.link.load_index(trained, timeout_seconds)
        if segment is None or self._offloader.client.selects_in_store:
            return segment is not None
        policy, layer, job = recall_policy(sequence), self._kept.index(trained.layer), trained.job
        device = self._shape.device
        arrays = {name: to_device(array, device) for name, array in segment.arrays.items()}
        read_keys = self._reader(sequence, layer) if job.needs_keys else None
        loaded = TrainedSegment(sequence.seat, layer, job, arrays, read_keys)
        policy.load(self._indexes.of(policy), loaded)
        return True

    def trains_prompt_there(self, sequence: Sequence) -> bool:
        """Return whether the store trains an index of the sequence's prompt, in any layer."""
        if not sequence.plan.selects:
            return False
        job = prompt_job(sequence)
        return job is not None and not self._is_trained_here(job, 0)

    def trains_leaving_there(self, sequence: Sequence) -> bool:
        """Return whether the store trains the tokens that leave the sequence's window."""
        plan, begin = sequence.plan, sequence.window_begin
        if not plan.selects:
            return False
        job = recall_policy(sequence).leaving_job(plan, begin, begin + 1)
        return job is not None and not self._is_trained_here(job, 0)

    def train_leaving(self, sequence: Sequence, job: IndexJob) -> deque[TrainedLayer]:
        """Index tokens that leave the window together. Returns what the store trains and `load` has to load. Raises
        StoreUnavailable and StoreSilent."""
        if self._is_trained_here(job, 0):
            positions = torch.arange(job.begin, job.end, device=self._shape.device)
            layer_bytes = self._shape.num_kv_heads * (job.end - job.begin) * self._pool.row_format.key_bytes
            at_once = max(1, WINDOW_BYTES // layer_bytes)
            for first in range(0, self._shape.num_layers, at_once):
                some = range(first, min(first + at_once, self._shape.num_layers))
                slots = torch.cat([self._fixed.window_rows(sequence, layer, positions) for layer in some])
                self._train_here(sequence, some, job, self._keys[slots])
            return deque()
        self._offloader.extents.seal(sequence, job.end)
        return deque(self._offloader.link.build_index(sequence, layer, job) for layer in self._kept)

    def _is_trained_here(self, job: IndexJob, layer: int) -> bool:
        is_hidden = job.is_bounded and layer < self._shape.num_layers - UNHIDDEN_LAYERS
        return self.trains_all or (self._helps and job.is_quick and not is_hidden)

    @property
    def _keys(self) -> Tensor:
        """The K half of the pool's rows, [slots, d]."""
        return self._pool.rows[:, : self._shape.head_dim]

    def _train_here(self, sequence: Sequence, layers: range, job: IndexJob, keys: Tensor) -> None:
        """Index the keys [layers x H_kv, T, d] of the job's tokens: many layers take hardly longer than one."""
        policy = recall_policy(sequence)
        arrays = policy.train(keys, job, sequence.request.sampling.seed or 0)
        by_layer = {name: array.unflatten(0, (len(layers), -1)) for name, array in arrays.items()}
        for place, layer in enumerate(layers):
            at_layer = {name: array[place] for name, array in by_layer.items()}
            trained = TrainedSegment(sequence.seat, layer, job, at_layer)
            policy.load(self._indexes.of(policy), trained)

    def _reader(self, sequence: Sequence, layer: int) -> ReadKeys:
        head_dim = self._shape.head_dim
        if sequence.can_miss:
            # It has given slots up since the store was asked.
            rows = self._offloader.host.inspect(sequence, self._kept[layer], self._shape.num_kv_heads)
            return lambda begin, end: rows[:, begin:end, :head_dim]

        def read(begin: int, end: int) -> Tensor:
            positions = torch.arange(begin, end, device=self._shape.device)
            return self._keys[self._whole.rows_of(sequence, range(layer, layer + 1), positions)[0]]

        return read


def is_quick(device: torch.device) -> bool:
    """Return whether a device trains at once what would keep the store's cores busy."""
    return device.type == "cuda"
