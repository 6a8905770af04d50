"""The interface of a policy, which decides which past tokens a decode step attends.

Sinks, the local window, top-k, the hot cache and attention are common to all policies and live in the engine;
a policy holds only its paper's idea. All state lies in tensors indexed by seat, so that any mix of requests is one
batch.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kv_store.client import RowFormat


class Family(enum.Enum):
    """Where attended rows come from: slots of all tokens, slots of what a policy keeps of the prompt, or the arena
    through the hot cache."""

    DENSE = "dense"
    RETAIN = "retain"
    RECALL = "recall"


class SeatTensors(Protocol):
    """Makes tensors of a part for each seat, behind which there is memory while the seat is taken."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        ...

    def tensor(self, size: tuple[int, ...], dtype: torch.dtype, tokens_each: int) -> Tensor:
        """Return an uninitialised tensor [seats + 1, *size]. size: [layers, KV heads, ...]. See `CacheShape.seated`."""
        ...


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes that every piece of KV state is built from.

    row_format: of rows in slots and in the arena. dtype: of the model's keys. layers: which layers of the model these
    are, where a cache serves some; None: all. seats: makes what is `seated`; None: plain tensors.
    """

    max_num_seqs: int
    num_layers: int
    num_kv_heads: int
    group_size: int
    row_format: RowFormat
    max_model_len: int
    scale: float
    device: torch.device
    dtype: torch.dtype = torch.float32
    layers: tuple[int, ...] | None = None
    seats: SeatTensors | None = None

    def part(self, layers: tuple[int, ...]) -> CacheShape:
        """The same of some of the model's layers, one behind another."""
        return replace(self, num_layers=len(layers), layers=layers)

    @property
    def head_dim(self) -> int:
        return self.row_format.head_dim

    @property
    def num_seats(self) -> int:
        """Seats that state is kept for, with that of padding lanes."""
        return self.max_num_seqs + 1

    def seated(self, *trailing: int, dtype: torch.dtype, tokens_each: int = 0) -> Tensor:
        """An uninitialised tensor [num_seats, num_layers, num_kv_heads, *trailing], with memory where seats are taken.

        tokens_each: the first trailing dimension is of places of so many tokens each, and a sequence uses the first of
        them; 0: it uses all.
        """
        size = (self.num_layers, self.num_kv_heads, *trailing)
        if self.seats is None:
            return torch.empty((self.num_seats, *size), dtype=dtype, device=self.device)
        return self.seats.tensor(size, dtype, tokens_each)


@dataclass(frozen=True, slots=True)
class Plan:
    """How one request spends its budget; fixed when its prompt is known.

    `num_selected` None: every candidate is attended and nothing is scored. `window_extra`: window tokens come on top
    of the budget (ClusterKV's unclustered tokens, CK-A1). `all_resident`: every token keeps a slot, because selecting
    reads exact keys. `has_means`: what is kept are means of tokens, at no position of their own, so that attention
    mass and recall are not measured.
    """

    num_prompt_tokens: int
    budget_tokens: int
    num_sink: int
    num_recent: int
    num_selected: int | None
    window_extra: bool = False
    all_resident: bool = False
    has_means: bool = False

    @property
    def selects(self) -> bool:
        return self.num_selected is not None

    @property
    def num_kept(self) -> int:
        """Tokens kept by each head: sinks, window and what is selected."""
        return self.num_sink + self.num_recent + (self.num_selected or 0)

    @classmethod
    def unsplit(cls, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        """A plan without sinks and window yet: all that is kept is selected."""
        return cls(num_prompt_tokens, budget_tokens, 0, 0, budget_tokens)

    def sinks(self, default: int) -> int:
        """Return a method's sinks, cut to a quarter of what is kept and never below one token."""
        return min(default, max(1, self.num_kept // 4))

    def split(self, num_sink: int = 0, num_recent: int = 0) -> Plan:
        """Take sinks and window from what is selected; attend all of a prompt that is kept whole."""
        if self.num_kept >= self.num_prompt_tokens:
            return attend_all(self.num_prompt_tokens, self.budget_tokens, num_sink, num_recent)
        num_selected = self.num_kept - num_sink - num_recent
        return replace(self, num_sink=num_sink, num_recent=num_recent, num_selected=num_selected)

    def split_by_number(self, num_sink: int, num_recent: int) -> Plan:
        """`split` for so many sinks and so long a window, cut to half of what the sinks leave."""
        num_sink = self.sinks(num_sink)
        return self.split(num_sink, min(num_recent, (self.num_kept - num_sink) // 2))

    def split_by_ratio(self, num_sink: int, recent_ratio: float) -> Plan:
        """`split` for so many sinks and a window that takes `recent_ratio` of what they leave."""
        num_sink = self.sinks(num_sink)
        return self.split(num_sink, int((self.num_kept - num_sink) * recent_ratio))

    def attending_all(self) -> Plan:
        """The same where nothing is selected."""
        return replace(self, num_selected=None)

    def of_layer(self, budget: int) -> Plan:
        """The plan of a layer whose heads keep so many tokens each on average. Sinks, window and the request's budget
        stay the same; a layer's budget too small for sinks and window keeps only these."""
        return replace(self, num_selected=max(0, budget - self.num_sink - self.num_recent))


class PromptAttention(ABC):
    """How one prompt's queries attend the tokens before them, if not all of them."""

    @abstractmethod
    def attend(self, query: Tensor, rows: Tensor, begin: int, scale: float) -> Tensor:
        """Attention of the tokens at `begin`, `begin` + 1, ... of one layer: query [T, H_q, d] to the same shape.

        rows: [H_kv, n, 2d], K then V, of which the first begin + T are there. scale: of the model's attention. Asked
        from 0 on in order, layer by layer.
        """


@dataclass(frozen=True, slots=True)
class StepQueries:
    """Queries of a step's new tokens in one layer: [B, H_q, d].

    own: the layer's. early: computes the queries that it would have if the layer before it changed nothing, for
    policies that predict; of the first layer its own.
    """

    own: Tensor
    early: Callable[[], Tensor]


class StepAttention(ABC):
    """How the new tokens of one step attend, layer by layer."""

    @abstractmethod
    def attend(self, layer: int, queries: StepQueries) -> Tensor:
        """Attention of the new tokens, which are in their slots already: [B, H_q, d]."""


class Policy(ABC):
    """A method by name. Its dataclass fields are the paper's hyper-parameters with the paper's defaults."""

    family: ClassVar[Family]
    # Selects by an index that only the worker can make: nothing is selected where the store does so.
    needs_index_here: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that requests use."""

    def plan(self, num_prompt_tokens: int, budget_tokens: int) -> Plan:
        """Split a budget (sinks and window included) for a prompt of this length."""
        return self.split(Plan.unsplit(num_prompt_tokens, budget_tokens))

    def split(self, plan: Plan) -> Plan:
        """Take sinks and window from an unsplit plan."""
        raise NotImplementedError(f"{self.name} must define `split`")

    def num_queries(self, plan: Plan) -> int:
        """How many of the prompt's last queries the policy reads of every prefilled layer."""
        return 0

    def prompt_attention(self, plan: Plan) -> PromptAttention | None:
        """How one prompt that it selects from is attended; None: densely. Rows that are not computed densely are not
        shared with other requests."""
        return None

    def window_begin(self, plan: Plan, num_tokens: int) -> int:
        """First position of the local window when `num_tokens` tokens are past. Never falls.

        It moves by one position a token, or it empties the window, as a whole.
        """
        return max(plan.num_sink, num_tokens - plan.num_recent)

    def max_window(self, plan: Plan) -> int:
        """Most tokens that the window ever holds."""
        return plan.num_recent


def attend_all(num_prompt_tokens: int, budget_tokens: int, num_sink: int, num_recent: int) -> Plan:
    """The plan of a prompt that its budget covers, or that is too short to be selected from."""
    num_sink = min(num_sink, num_prompt_tokens)
    return Plan(num_prompt_tokens, budget_tokens, num_sink, num_recent, num_selected=None)


def without_index(policy: Policy) -> str:
    """Why a policy cannot be served where the store selects, and what to do."""
    return (
        f"Policy {policy.name!r} selects by an index on the worker's device, and with --transport grpc there is none: "
        "choose bitkeys, pqcache or clusterkv, or start the worker with --transport zero_copy or shm."
    )
