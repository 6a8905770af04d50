"""The interface of a recall policy, which scores every past token at every step; all stay recallable."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from gpu_worker.kernels.attention import Rest
from gpu_worker.kernels.top_k import outside, top_k
from gpu_worker.policies.base import CacheShape, Family, Plan, Policy, StepQueries
from kv_store.client import IndexParams


@dataclass(frozen=True, slots=True)
class IndexJob:
    """An index to train, by the store or on the model's device: of the tokens at [begin, end), in every layer.

    coarse: the least that the store must train where `load` can do the rest from the keys; None: all of it. is_quick: a
    GPU trains a layer in less time and memory than is worth a wait for the store. is_bounded: the store fits its time
    to that of a layer's prefill, so that all but the last layers hide behind it. needs_keys: the trained arrays do not
    cover single tokens; `load` gets the tokens' keys. num_before: clusters that the sequence has from earlier jobs.
    """

    begin: int
    end: int
    params: IndexParams
    coarse: IndexParams | None = None
    is_quick: bool = False
    is_bounded: bool = False
    needs_keys: bool = False
    num_before: int = 0

    def coarsened(self) -> IndexJob:
        """The store's part of the job, if the keys will be at hand afterwards."""
        return (
            self if self.coarse is None else replace(self, params=self.coarse, coarse=None, needs_keys=True)
        )


def _not_there() -> tuple[Tensor, Tensor]:
    raise LookupError("exact keys are available only where the plan keeps every token resident")


def _none_fixed() -> tuple[Tensor, Tensor]:
    raise LookupError("the keys of sinks and window were not given")


@dataclass(frozen=True, slots=True)
class Candidates:
    """One layer's scoring problem: B seats, their new tokens' queries, and their candidates.

    queries: of the new tokens. seats, begin, end: int64 [B]; candidates are the positions [begin, end). num_positions
    is N, at least the largest end. scale: of the model's attention. exact_keys: reads the keys of all tokens, the new
    one included, [B, H_kv, M, d], and their number, int64 [B], where the plan keeps them resident. fixed_keys: reads
    those of sinks, window and new token, [B, H_kv, F, d], in no order, and whether a token is there, bool [B, H_kv, F].
    """

    layer: int
    queries: StepQueries
    seats: Tensor
    begin: Tensor
    end: Tensor
    num_positions: int
    scale: float
    exact_keys: Callable[[], tuple[Tensor, Tensor]] = _not_there
    fixed_keys: Callable[[], tuple[Tensor, Tensor]] = _none_fixed

    @property
    def query(self) -> Tensor:
        """[B, H_q, d]."""
        return self.queries.own

    def outside(self) -> Tensor:
        """Positions that are no candidates: bool [B, N]."""
        return outside(self.num_positions, self.begin, self.end)


@dataclass(frozen=True, slots=True)
class Leaving:
    """Tokens that leave the window at a step, at most one of each of B seats: seats, positions int64 [B], -1 where none
    leaves. read_keys: theirs in these layers, [B, len(layers), H_kv, d]."""

    seats: Tensor
    layers: range
    positions: Tensor
    read_keys: Callable[[], Tensor]

    def at_layers(self, state: Tensor) -> Tensor:
        """Return the part of an index's [seats, L, ...] that these layers have."""
        return state[:, self.layers.start : self.layers.stop]

    def read(self, state: Tensor, block_size: int = 1) -> Tensor:
        """Read what the tokens' places have: [B, len(layers), H_kv, ...] of [seats, L, H_kv, N, ...], N places of
        `block_size` positions each."""
        places = self.positions.clamp(min=0) // block_size
        return self.at_layers(state)[self.seats, :, :, places]

    def write(self, state: Tensor, new: Tensor, block_size: int = 1, is_new: Tensor | None = None) -> None:
        """Write what `read` returns. A row without a token writes back what is there, and so does one that is not
        `is_new`, bool [B]."""
        places = self.positions.clamp(min=0) // block_size
        is_written = self.positions >= 0 if is_new is None else is_new & (self.positions >= 0)
        old = self.read(state, block_size)
        is_written = is_written.view(-1, *[1] * (old.dim() - 1))
        self.at_layers(state)[self.seats, :, :, places] = new.to(old.dtype).where(is_written, old)


@dataclass(frozen=True, slots=True)
class PrefilledLayer:
    """One layer of a seat's prompt. keys, values: [H_kv, n, d], in the model's dtype. queries: [H_q, w, d] of its last
    w tokens, as many as the policy's `num_queries`."""

    seat: int
    layer: int
    plan: Plan
    keys: Tensor
    values: Tensor
    queries: Tensor


# Keys of the positions from the first number to before the second, of one layer: [H_kv, T, d] in the model's dtype.
ReadKeys = Callable[[int, int], Tensor]


@dataclass(frozen=True, slots=True)
class TrainedSegment:
    """The arrays that a job trained in a layer of a seat.

    arrays: on the index's device, as in `kv_store.client.IndexSegment`. read_keys: keys of the job's tokens, where it
    `needs_keys`.
    """

    seat: int
    layer: int
    job: IndexJob
    arrays: Mapping[str, Tensor]
    read_keys: ReadKeys | None = None


IndexT = TypeVar("IndexT")


class RecallPolicy(Policy, Generic[IndexT]):
    """Scores every candidate at every step; the engine attends the best."""

    family = Family.RECALL
    needs_index_here: ClassVar[bool] = True

    # What is indexed.

    @abstractmethod
    def allocate(self, shape: CacheShape) -> IndexT:
        """The index state of every seat, uninitialised."""

    def observe_prefill(self, index: IndexT, prefilled: PrefilledLayer) -> None:
        """Index what it can of a prefilled layer."""
        return None

    def prompt_job(self, plan: Plan, begin: int, end: int) -> IndexJob | None:
        """The job for a prefilled prompt's candidates [begin, end); None: nothing is trained."""
        return None

    def store_job(self, plan: Plan, begin: int, end: int) -> IndexJob | None:
        """The job for a store that selects by itself; else as `prompt_job`, and so by default."""
        return self.prompt_job(plan, begin, end)

    def train(self, keys: Tensor, job: IndexJob, seed: int) -> Mapping[str, Tensor]:
        """Train as the store would, on the keys' device and without waiting for it.

        keys: [H, T, d] of the job's tokens, of any float type; H may be the heads of several layers. The same keys, job
        and seed give the same arrays, as `load` takes them but for the first dimension."""
        raise NotImplementedError(f"{self.name} must define `train`")

    def training_bytes(self, keys: Tensor, job: IndexJob) -> int:
        """Most bytes that `train` has on a GPU at one time, the keys left out and the arrays included. keys: on the
        meta device, of which shape and type count."""
        return 0

    def load(self, index: IndexT, trained: TrainedSegment) -> None:
        """Copy a trained segment into the seat's index."""

    def load_bytes(self, num_keys: int) -> int:
        """Most bytes that `load` uses on a GPU at one time for so many keys of all heads, without its arguments."""
        return 0

    # What leaves the window.

    def leaving_job(self, plan: Plan, begin: int, end: int) -> IndexJob | None:
        """The job for the tokens [begin, end), which leave the window together; None: they leave one by one, and
        `extend` codes them."""
        return None

    def extend(self, index: IndexT, leaving: Leaving) -> None:
        """Code tokens that leave the window one by one."""

    # How a step is attended.

    def select(self, index: IndexT, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        """Positions of the best `counts[b]` candidates of every head, ascending, -1 pads: int64 [B, H_kv, width].

        counts: int64 [B], none above `width`. Ties go to the higher position. A policy that need not score every
        candidate overrides this.
        """
        return top_k(self.score(index, candidates), counts, width)

    @property
    def stands_in(self) -> bool:
        """Return whether something is attended in place of the candidates that are not selected."""
        return False

    def stand_in(self, index: IndexT, candidates: Candidates, selected: Tensor, rest: Rest) -> None:
        """Write what is attended in place of the candidates outside `selected`, which `select` gave. On a GPU this runs
        on a side stream, while what is selected is attended."""
        raise NotImplementedError(f"{self.name} has nothing stand in")

    @abstractmethod
    def score(self, index: IndexT, candidates: Candidates) -> Tensor:
        """float32 [B, H_kv, N]: the larger, the sooner attended; -inf for positions that are no candidates."""
