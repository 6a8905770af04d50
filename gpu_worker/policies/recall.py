"""What a recall policy is: it scores every past token at every step, of which all stay recallable."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from gpu_worker.kernels.top_k import top_k
from gpu_worker.policies.base import CacheShape, Family, Plan, Policy
from kv_store.client import KMeansParams, PQParams


@dataclass(frozen=True, slots=True)
class IndexJob:
    """An index to train, by the store or on the model's device: of the tokens at [begin, end), in every layer.

    needs_keys: what is trained says nothing of single tokens; `load` gets their keys to do so itself. num_before:
    clusters that the sequence has from jobs before this one.
    """

    begin: int
    end: int
    params: PQParams | KMeansParams
    needs_keys: bool = False
    num_before: int = 0


@dataclass(frozen=True, slots=True)
class FixedKeys:
    """Keys of sinks, window and new token, where they lie. pool: [num_slots, 2d], a row is K then V. slots: int32
    [B, H_kv, F], its rows, -1 pads."""

    pool: Tensor
    slots: Tensor

    def at(self, channels: Tensor) -> Tensor:
        """Their values in the channels int64 [B, H_kv, r]: float32 [B, H_kv, F, r]; what pads have is anything."""
        return self.pool[self.slots.clamp(min=0).long()[..., None], channels[:, :, None]].float()


@dataclass(frozen=True, slots=True)
class Candidates:
    """One layer's scoring problem: B seats, their new token's queries, and where their candidates lie.

    query: [B, H_q, d]. seats, begin, end: int64 [B]; candidates are the positions [begin, end). num_positions is N,
    at least the largest end. scale: of the model's attention. For a policy with `reads_keys`: keys [B, H_kv, M, d] of
    all tokens, the new one included, and their number, num_tokens int64 [B]; else None. For one with
    `reads_early_query`: early_query, like query, but of the previous layer's attention input (the first layer's own).
    fixed: for one that `mixes_mean`.
    """

    layer: int
    query: Tensor
    seats: Tensor
    begin: Tensor
    end: Tensor
    num_positions: int
    scale: float
    keys: Tensor | None = None
    num_tokens: Tensor | None = None
    early_query: Tensor | None = None
    fixed: FixedKeys | None = None


IndexT = TypeVar("IndexT")

# Keys of the positions from the first number to before the second, of one layer: [H_kv, T, d] in the model's dtype.
ReadKeys = Callable[[int, int], Tensor]


class RecallPolicy(Policy, Generic[IndexT]):
    """Scores every candidate at every step; the engine attends the best."""

    family = Family.RECALL
    needs_index_here: ClassVar[bool] = True
    # Scores exact keys: then every token must be resident.
    reads_keys: ClassVar[bool] = False
    # Tokens that leave the window are trained, all at once, rather than coded one by one by `extend`.
    trains_when_leaving: ClassVar[bool] = False
    # A GPU trains the indexes of a prompt's last layers itself, in less time and memory than is worth a wait.
    trains_last_layers: bool = False
    # Guesses a layer's query before the layer before it is done.
    reads_early_query: ClassVar[bool] = False
    # What a step leaves out is stood for by the mean of all values (`missed`).
    mixes_mean: ClassVar[bool] = False

    @abstractmethod
    def allocate(self, shape: CacheShape) -> IndexT:
        """The index state of every seat, uninitialised."""

    def index_job(self, plan: Plan, begin: int, end: int) -> IndexJob | None:
        """What must be trained for candidates [begin, end); None: nothing."""
        return None

    def observe_prefill(
        self, index: IndexT, seat: int, layer: int, plan: Plan, keys: Tensor, queries: Tensor
    ) -> None:
        """Index a prefilled layer without training. keys: [H_kv, n, d] of the prompt, in the model's dtype. queries:
        [H_q, w, d] of its last w tokens, as many as `num_queries`."""

    def coarse(self, job: IndexJob) -> IndexJob:
        """The least of a job that the store must do where the keys are at hand when it is done; the job itself, unless
        `load` can do the rest."""
        return job

    def load(
        self,
        index: IndexT,
        seat: int,
        layer: int,
        job: IndexJob,
        arrays: Mapping[str, Tensor],
        read_keys: ReadKeys | None = None,
    ) -> None:
        """Copy a trained segment into the seat's index. arrays: on its device, as `kv_store.client.IndexSegment` has
        them. read_keys: where the job `needs_keys`, of its tokens."""

    def load_bytes(self, num_keys: int) -> int:
        """Most bytes that `load` has on a GPU at one time beside what it is given, for a segment of so many keys of
        all heads."""
        return 0

    def extend(self, index: IndexT, seats: Tensor, layers: range, positions: Tensor, keys: Tensor) -> None:
        """Code tokens that leave the window. seats, positions: int64 [B], -1 where none leaves. keys:
        [B, len(layers), H_kv, d]."""

    def select(self, index: IndexT, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        """Positions of the best `counts[b]` candidates of every head, ascending, -1 pads: int64 [B, H_kv, width].

        counts: int64 [B], none above `width`. Ties go to the higher position. A policy with a shorter way than to
        score every candidate overrides this.
        """
        return top_k(self.score(index, candidates), counts, width)

    def missed(self, index: IndexT, candidates: Candidates, selected: Tensor) -> Tensor:
        """Share of the attention that candidates have which are not selected, as far as the policy can tell: float32
        [B, H_q], in [0, 1]. selected: as `select` gave them. For a policy that `mixes_mean`."""
        raise NotImplementedError(f"{self.name} attends what it selects and no more")

    @abstractmethod
    def score(self, index: IndexT, candidates: Candidates) -> Tensor:
        """float32 [B, H_kv, N]: the larger, the sooner attended; -inf for what is no candidate."""
