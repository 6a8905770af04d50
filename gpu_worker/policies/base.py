"""What a policy is: which past tokens a decode step attends.

Sinks, the local window, top-k, the hot cache and attention are common to all policies and live in the engine;
a policy holds its paper's idea and nothing else. All state lies in tensors indexed by seat, the running request's
row in every batched tensor, so that any mix of requests is one batch.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from gpu_worker.kernels.top_k import top_k
from kv_store.client import KMeansParams, PQParams


class Family(enum.Enum):
    """Where the attended rows come from: all from slots, or selected from the arena through the hot cache."""

    DENSE = "dense"
    RECALL = "recall"


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes that every piece of KV state is built from."""

    max_num_seqs: int
    num_layers: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    max_model_len: int
    scale: float
    device: torch.device

    def seated(self, *trailing: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor [max_num_seqs, num_layers, num_kv_heads, *trailing]; pages are touched when used."""
        shape = (self.max_num_seqs, self.num_layers, self.num_kv_heads, *trailing)
        return torch.empty(shape, dtype=dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Plan:
    """How one request spends its budget; fixed when its prompt is known.

    `num_selected` None: every candidate is attended and nothing is scored. `window_extra`: window tokens come on
    top of the budget (ClusterKV's unclustered tokens, CK-A1).
    """

    num_prompt_tokens: int
    budget_tokens: int
    num_sink: int
    num_recent: int
    num_selected: int | None
    window_extra: bool = False

    @property
    def selects(self) -> bool:
        return self.num_selected is not None


@dataclass(frozen=True, slots=True)
class IndexJob:
    """An index to train, by the store or on the model's device: of the tokens at [begin, end), in every layer."""

    begin: int
    end: int
    params: PQParams | KMeansParams


@dataclass(frozen=True, slots=True)
class Candidates:
    """One layer's scoring problem: B seats, their new token's queries, and where their candidates lie.

    query: [B, H_q, d]. seats, begin, end: int64 [B]; candidates are the positions [begin, end). num_positions is N,
    at least the largest end. scale: of the model's attention. For a policy with `reads_keys`: keys [B, H_kv, M, d] of
    all tokens, the new one included, and their number, num_tokens int64 [B]; else None.
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


class Policy(ABC):
    """A method by name. Its dataclass fields are the paper's hyper-parameters with the paper's defaults."""

    name: ClassVar[str]
    family: ClassVar[Family]

    @abstractmethod
    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        """Split a budget (sinks and window included) for a prompt of this length."""

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        """First position of the local window when `num_tokens` tokens are past. Never falls; 0: no window.

        It moves by one position a token, or it empties the window (`trains_when_leaving`).
        """
        return 0

    def max_window(self, plan: Plan) -> int:
        """Most tokens that the window ever holds."""
        return 0


IndexT = TypeVar("IndexT")


class RecallPolicy(Policy, Generic[IndexT]):
    """Scores every candidate at every step; the engine attends the best."""

    family = Family.RECALL
    # Scores exact keys: then every token must be resident.
    reads_keys: ClassVar[bool] = False
    # Tokens that leave the window are trained, all at once, rather than coded one by one by `extend`.
    trains_when_leaving: ClassVar[bool] = False

    @abstractmethod
    def allocate(self, shape: CacheShape) -> IndexT:
        """The index state of every seat, uninitialised."""

    def index_job(self, plan: Plan, begin: int, end: int) -> IndexJob | None:
        """What must be trained for candidates [begin, end); None: nothing."""
        return None

    def load(self, index: IndexT, seat: int, layer: int, job: IndexJob, arrays: Mapping[str, Tensor]) -> None:
        """Copy a trained segment into the seat's index. arrays: on its device, as `kv_store.client.IndexSegment` has
        them."""

    def extend(self, index: IndexT, seats: Tensor, layers: range, positions: Tensor, keys: Tensor) -> None:
        """Code tokens that leave the window. seats, positions: int64 [B], -1 where none leaves. keys:
        [B, len(layers), H_kv, d]."""

    def select(self, index: IndexT, candidates: Candidates, counts: Tensor, width: int) -> Tensor:
        """Positions of the best `counts[b]` candidates of every head, ascending, -1 pads: int64 [B, H_kv, width].

        counts: int64 [B], none above `width`. Ties go to the higher position. A policy with a shorter way than to
        score every candidate overrides this.
        """
        return top_k(self.score(index, candidates), counts, width)

    @abstractmethod
    def score(self, index: IndexT, candidates: Candidates) -> Tensor:
        """float32 [B, H_kv, N]: the larger, the sooner attended; -inf for what is no candidate."""


def attend_all(num_prompt_tokens: int, budget_tokens: int, num_sink: int, num_recent: int) -> Plan:
    """The plan of a prompt that its budget covers, or that is too short to be selected from."""
    num_sink = min(num_sink, num_prompt_tokens)
    return Plan(num_prompt_tokens, budget_tokens, num_sink, num_recent, num_selected=None)


def sink_tokens(default: int, budget_tokens: int) -> int:
    """A method's sinks, cut to a quarter of a small budget and never below one token."""
    return min(default, max(1, budget_tokens // 4))
