"""Where the indexes of recall policies come from: the store's cores, the model's device, or one after the other."""

from __future__ import annotations

import time
from typing import cast

import torch
from torch import Tensor

from gpu_worker.engine.caches.fixed_slots import FixedSlots
from gpu_worker.engine.caches.index_book import IndexBook
from gpu_worker.engine.caches.whole_context import WholeContext
from gpu_worker.engine.offload import Offloader, TrainedLayer
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.slot_pool import SlotPool
from gpu_worker.errors import StoreUnavailable
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.recall.base import IndexJob, ReadKeys, RecallPolicy
from gpu_worker.trainers import train_index

# Longest wait for the store to train an index; far above any real one, it only bounds a hang.
INDEX_TIMEOUT_SECONDS = 600.0
# Between two looks at whether the store is still there.
INDEX_WAIT_SECONDS = 0.5
# The last layer of a prompt is computed for one token only: nothing hides the training of its index, nor of the one
# before.
UNHIDDEN_LAYERS = 2


def recall_policy(sequence: Sequence) -> RecallPolicy:
    """The policy of a sequence that the recall cache serves; CacheSet gives it no other."""
    return cast(RecallPolicy, sequence.policy)


def prompt_job(sequence: Sequence) -> IndexJob | None:
    """The index that a prefilled layer needs: of all between sinks and window."""
    plan = sequence.plan
    return recall_policy(sequence).index_job(plan, plan.num_sink, sequence.window_begin)


class IndexTraining:
    """Has layers indexed, and puts what was trained into the policies' indexes.

    trains_here: on the model's device; else by the store. Where that device is a GPU, it trains what the second token
    would wait for (`RecallPolicy.trains_last_layers`); and where it has every row, the store does only what takes cores
    and leaves the rest to it (`RecallPolicy.coarse`).
    """

    def __init__(
        self,
        shape: CacheShape,
        pool: SlotPool,
        offloader: Offloader,
        indexes: IndexBook,
        whole: WholeContext,
        fixed: FixedSlots,
        trains_here: bool,
    ) -> None:
        self._shape = shape
        self._pool = pool
        self._offloader = offloader
        self._indexes = indexes
        self._whole = whole
        self._fixed = fixed
        self.trains_here = trains_here
        self._is_quick = is_quick(shape.device)

    def observe(self, sequence: Sequence, layer: int, rows: Tensor, queries: Tensor) -> None:
        """Let the policy see a prefilled layer, rows [H_kv, n, 2d]; train its index where that is done here."""
        self._indexes.observe(recall_policy(sequence), sequence.seat, layer, sequence.plan, rows, queries)
        job = prompt_job(sequence) if self._is_trained_here(sequence, layer) else None
        if job is not None:
            self._train_here(sequence, layer, job, rows[:, job.begin : job.end, : self._shape.head_dim])

    def job(self, sequence: Sequence, layer: int) -> IndexJob | None:
        """What the store is to train of a prefilled layer; None: nothing."""
        if not sequence.plan.selects or self._is_trained_here(sequence, layer):
            return None
        job = prompt_job(sequence)
        if job is None or sequence.can_miss or not self._is_quick:
            return job
        return recall_policy(sequence).coarse(job)

    def load(self, sequence: Sequence, trained: TrainedLayer, timeout_seconds: float) -> bool:
        """Take a trained index over if it is ready within the time. Raises StoreUnavailable when none will come."""
        segment = self._offloader.segment(trained, timeout_seconds)
        if segment is None:
            return False
        policy, layer, job = recall_policy(sequence), trained.layer, trained.job
        device = self._shape.device
        arrays = {name: torch.tensor(array, device=device) for name, array in segment.arrays.items()}
        read_keys = self._reader(sequence, layer) if job.needs_keys else None
        self._indexes.load(policy, sequence.seat, layer, job, arrays, read_keys)
        return True

    def train_leaving(self, sequence: Sequence, layers: range, begin: int, end: int) -> None:
        """Index the tokens [begin, end), which leave the window. Raises StoreUnavailable."""
        job = recall_policy(sequence).index_job(sequence.plan, begin, end)
        if job is None:
            return
        if self.trains_here:
            positions = torch.arange(begin, end, device=self._shape.device)
            for layer in layers:
                rows = self._pool.rows[self._fixed.window_rows(sequence, layer, positions)]
                self._train_here(sequence, layer, job, rows[..., : self._shape.head_dim])
            return
        self._offloader.seal(sequence, end)
        trained = [self._offloader.build(sequence, layer, job) for layer in layers]
        deadline = time.monotonic() + INDEX_TIMEOUT_SECONDS
        for index in trained:
            while not self.load(sequence, index, INDEX_WAIT_SECONDS):
                if time.monotonic() > deadline:
                    raise StoreUnavailable(f"no index within {INDEX_TIMEOUT_SECONDS:.0f} s")

    def _is_trained_here(self, sequence: Sequence, layer: int) -> bool:
        is_last = self._is_quick and layer >= self._shape.num_layers - UNHIDDEN_LAYERS
        return self.trains_here or (is_last and recall_policy(sequence).trains_last_layers)

    def _train_here(self, sequence: Sequence, layer: int, job: IndexJob, keys: Tensor) -> None:
        """Index the keys [H_kv, T, d] of the job's tokens."""
        arrays = train_index(keys, job.params, sequence.request.sampling.seed or 0)
        self._indexes.load(recall_policy(sequence), sequence.seat, layer, job, arrays)

    def _reader(self, sequence: Sequence, layer: int) -> ReadKeys:
        head_dim = self._shape.head_dim
        if sequence.can_miss:
            # It has given slots up since the store was asked.
            rows = self._offloader.inspect(sequence, layer, self._shape.num_kv_heads)
            return lambda begin, end: rows[:, begin:end, :head_dim]

        def read(begin: int, end: int) -> Tensor:
            positions = torch.arange(begin, end, device=self._shape.device)
            return self._pool.rows[self._whole.rows_of(sequence, layer, positions)][..., :head_dim]

        return read


def is_quick(device: torch.device) -> bool:
    """Whether a device does at once what would keep the store's cores busy."""
    return device.type == "cuda"
