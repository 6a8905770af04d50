"""Index segments: planned here, trained elsewhere."""

from __future__ import annotations

import math
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, replace

from xxhash import xxh3_64_intdigest

from kv_store.client.errors import InvalidStoreRequest, NotInStore
from kv_store.client.indexes import ArrayRef, ArraySpec, IndexParams
from kv_store.errors import TrainingFailed, out_of_space
from kv_store.index import Effort, FitCost, FitOptions, Index, IterationBound, make_index
from kv_store.sequences import Sequence, StoredIndex
from kv_store.state import StoreState, Training
from kv_store.trainers import TrainerPool, TrainOutcome, TrainTask
from kv_store.trainers.task import view_bytes

_MAX_ITERATIONS = 10_000


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """A request to train on tokens of one layer; `prefill_seconds` 0: unknown."""

    sequence_id: str
    layer: int
    token_begin: int
    token_end: int
    params: IndexParams
    seed: int
    prefill_seconds: float


@dataclass(frozen=True, slots=True)
class BuiltIndex:
    """A finished index, as the caller learns of it."""

    kind: str
    arrays: tuple[ArrayRef, ...]
    training_seconds: float
    iterations: int


class IndexBuilder:
    """Builds indexes; `build` waits for a trainer and holds no lock meanwhile."""

    def __init__(
        self, state: StoreState, trainers: TrainerPool, bound: IterationBound, max_points_per_centroid: int
    ) -> None:
        self._state = state
        self._trainers = trainers
        self._bound = bound
        self._max_points_per_centroid = max_points_per_centroid

    def build(self, epoch: int, worker_id: str, request: BuildRequest) -> BuiltIndex:
        """Train an index over sealed tokens and keep it until the sequence is released.

        Raises InvalidStoreRequest, StoreFull, TrainingFailed, NotInStore when the sequence ended meanwhile.
        """
        if not 0 <= request.params.max_iterations <= _MAX_ITERATIONS:
            raise InvalidStoreRequest(
                f"max_iterations is {request.params.max_iterations}, it must be from 0 to {_MAX_ITERATIONS}"
            )
        if not 0.0 <= request.prefill_seconds < math.inf:
            raise InvalidStoreRequest(
                f"prefill_seconds is {request.prefill_seconds}, it must be finite and not negative"
            )
        index = make_index(request.params)
        with self._state.entered(epoch, worker_id) as state:
            sequence = state.sequences.get(worker_id, request.sequence_id)
            sequence.check_sealed(request.layer, request.token_begin, request.token_end)
            shift = state.geometry.token_shift
            first = request.token_begin >> shift
            source = sequence.table[request.layer, first : ((request.token_end - 1) >> shift) + 1].copy()
            specs = index.specs(state.geometry.layout, request.token_end - request.token_begin)
            options = self._options(index, request)
            segment, arrays = self._allocate(specs, sequence.owner)
            task = TrainTask(
                layout=state.geometry.layout,
                slab_bytes=state.slab_bytes,
                slab_ids=tuple(source.tolist()),
                skip=request.token_begin - (first << shift),
                num_tokens=request.token_end - request.token_begin,
                heads=(0, state.geometry.layout.num_kv_heads),
                params=request.params,
                options=options,
                arrays=arrays,
            )
            state.allocator.retain(source)
            training = Training(source, segment)
            state.trainings.append(training)
        try:
            outcome = self._train(sequence, task)
            data = state.arena.data
            arrays = tuple(
                replace(ref, checksum=xxh3_64_intdigest(view_bytes(data, ref).data)) for ref in arrays
            )
            with state.lock:
                self._bound.observe(index.costs_like, _cost(index, task, outcome))
                state.counters.training_seconds += outcome.seconds
                state.counters.num_trainings += 1
                self._check_alive(sequence)
                state.allocator.retain(segment)
                begin = request.token_begin + index.num_leading
                sequence.indexes.append(
                    StoredIndex(index, request.layer, begin, request.token_end, segment, arrays)
                )
        finally:
            with state.lock:
                state.trainings.remove(training)
                state.allocator.release(source)
                state.allocator.release(segment)
        return BuiltIndex(index.kind, arrays, outcome.seconds, outcome.iterations)

    def _allocate(self, specs: tuple[ArraySpec, ...], owner: str) -> tuple[range, tuple[ArrayRef, ...]]:
        starts, end = [], 0
        for spec in specs:
            starts.append(end)
            end += spec.aligned_bytes
        if end > self._state.arena.handle.num_bytes:
            raise out_of_space("an index", end - self._state.arena.handle.num_bytes)
        segment = self._state.allocate_segment(end, "an index", owner)
        base = segment.start * self._state.slab_bytes
        return segment, tuple(
            ArrayRef(spec.name, base + start, spec.num_bytes, spec.dtype, spec.shape)
            for spec, start in zip(specs, starts, strict=True)
        )

    def _options(self, index: Index, request: BuildRequest) -> FitOptions:
        num_tokens = request.token_end - request.token_begin
        num_points = index.num_points(num_tokens, self._max_points_per_centroid)
        if request.params.max_iterations:
            effort = Effort(request.params.max_iterations)
        else:
            effort = self._bound.effort(index.costs_like, num_tokens, num_points, request.prefill_seconds)
        per_centroid = self._max_points_per_centroid
        if effort.share < 1:
            per_centroid = math.ceil(effort.share * num_points / index.num_centroids)
        return FitOptions(effort.iterations, request.seed, per_centroid)

    def _train(self, sequence: Sequence, task: TrainTask) -> TrainOutcome:
        """Every head by itself: so the last layer of a prompt, which nothing hides, has many cores."""
        state = self._state
        tasks = [replace(task, heads=(head, head + 1)) for head in range(*task.heads)]
        trainings: list[Future[TrainOutcome]] = []
        try:
            with state.lock:
                # Checked first: ending the sequence from here on cancels the training too.
                self._check_alive(sequence)
                for each in tasks:
                    trainings.append(self._trainers.submit(each))
                    sequence.trainings.add(trainings[-1])
            return TrainOutcome.over([training.result() for training in trainings])
        except CancelledError as exc:
            with state.lock:
                self._check_alive(sequence)
            raise TrainingFailed("the store is shutting down") from exc
        except RuntimeError as exc:
            raise TrainingFailed(f"the trainers take no index: {exc}") from exc
        finally:
            # The slabs must not be reused while a head is still being trained.
            wait([training for training in trainings if not training.cancel()])
            with state.lock:
                sequence.trainings.difference_update(trainings)

    def _check_alive(self, sequence: Sequence) -> None:
        """Raises NotInStore once the sequence has ended, also when another has taken its name."""
        if self._state.sequences.find(sequence.worker_id, sequence.sequence_id) is not sequence:
            raise NotInStore(f"sequence {sequence.sequence_id!r} ended while its index was trained")


def _cost(index: Index, task: TrainTask, outcome: TrainOutcome) -> FitCost:
    num_points = index.num_points(task.num_tokens, task.options.max_points_per_centroid)
    return FitCost(
        task.num_tokens, num_points, outcome.iterations, outcome.seconds, outcome.iterating_seconds
    )
