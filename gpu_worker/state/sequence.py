"""A request's place on the device: its tokens, slots and rows, and its cost so far."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from gpu_worker.engine.request import AHEAD
from gpu_worker.policies.base import Family, Plan, Policy, PromptAttention
from gpu_worker.records import FinishReason, GenerationRequest, Usage
from gpu_worker.sampling import SamplerState
from gpu_worker.state.account import Meter
from gpu_worker.state.resident_prefixes import LeftRows, Resident


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """counts: rows that each KV head kept when the layer was last compressed.
    room: slots of a head for tokens decoded since.
    rounds, history: of the policy's last `Retained` of the layer.
    """

    counts: tuple[int, ...]
    room: int
    rounds: int
    history: Tensor | None

    def lengths(self, num_decoded: int) -> list[int]:
        """Slots that each head has filled, so many decoded tokens later."""
        grown = min(num_decoded, self.room)
        return [count + grown for count in self.counts]


@dataclass(slots=True)
class Kept:
    """The rows that a compressed sequence keeps.

    at: `num_tokens` of the sequence when it was compressed last.
    longest: rows of the head that kept most then; total: of all heads and layers.
    layers: more of each layer, by number.
    """

    at: int = 0
    longest: int = 0
    total: int = 0
    layers: dict[int, KeptLayer] = field(default_factory=dict)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A request as the runner executes it. `seat` is its index in every seated tensor, -1 before admission.

    num_tokens: tokens with computed KV.
    num_cached: tokens to prefill that the store had already; num_reused: of the prompt, when it was admitted first.
    is_prefilled: its prompt is done, and its first token is on its way.
    next_token: the input of the next decode step; below -1 it is on its way (`drawn_at`).
    names: of the slabs that its prompt fills, once asked for.
    resident: the known prefix, where it may lie in slots; left: what is left there of a compressed prompt.
    forced: tokens that go through decode steps before anything is sampled: of the prompt (protocol P2), and those
    generated before a preemption.
    generated: its answer so far.
    capacity: tokens it may ever hold.
    is_open_ended: its answer may fill the context.
    num_backed: tokens for which it has what grows with them: slots of each head in layers that take them so, and
    indexes. num_slots: of each head in layers that recall; of a fully resident sequence its capacity.
    ring_size: window tokens and the new one, at most, where it selects.
    leaving: the position that leaves the window at the next step, -1 for none.
    offloads: its rows go to the store; known once it is admitted.
    mark: its policy's number for the next step.
    is_scored: the prompt's log probabilities were emitted.
    """

    request: GenerationRequest
    policy: Policy
    plan: Plan
    sampler: SamplerState
    capacity: int
    num_prefill: int
    is_open_ended: bool = False
    seat: int = -1
    is_prefilled: bool = False
    num_tokens: int = 0
    num_cached: int = 0
    names: tuple[bytes, ...] | None = None
    resident: Resident | None = None
    left: LeftRows | None = None
    # False once a prefix that the store had was lost or corrupt: all of the prompt is computed then.
    trusts_prefixes: bool = True
    next_token: int = -1
    forced: deque[int] = field(default_factory=deque)
    generated: list[int] = field(default_factory=list)
    num_reused: int = 0
    was_preempted: bool = False
    is_scored: bool = False
    num_slots: int = 0
    num_backed: int = 0
    window_begin: int = 0
    offloads: bool = False
    ring_size: int = 0
    leaving: int = -1
    kept: Kept = field(default_factory=Kept)
    mark: int = 0
    fetched_bytes: int = 0
    meter: Meter = field(default_factory=Meter)

    @property
    def sequence_id(self) -> str:
        return self.request.request_id

    @property
    def num_output(self) -> int:
        return len(self.generated)

    @property
    def prefill_token_ids(self) -> tuple[int, ...]:
        """The tokens to prefill: of the prompt, and of its answer so far where that is attended like a prompt."""
        return (*self.request.prompt_token_ids, *self.generated)[: self.num_prefill]

    @property
    def known_tokens(self) -> int:
        """Tokens of prompt and answer that it holds before the next one is sampled."""
        return len(self.request.prompt_token_ids) + len(self.generated)

    @property
    def soon_tokens(self) -> int:
        """Tokens that it holds before it asks for more slots."""
        return min(self.capacity, self.known_tokens + AHEAD)

    @property
    def sure_tokens(self) -> int:
        """Tokens for which there must be slots if it ran alone: all, but for an answer that ends where memory does."""
        return min(self.capacity, self.known_tokens + 1) if self.is_open_ended else self.capacity

    @property
    def shares_prompt(self) -> bool:
        """Return whether other requests may have its prompt's rows. A sparsely attended prompt's rows depend on policy
        and budget, so it shares none."""
        return self.request.shares_prefix and self.prompt_attention() is None

    @property
    def scores_prompt(self) -> bool:
        """Return whether all of its prompt must be computed, to score its tokens."""
        return self.request.sampling.prompt_logprobs is not None and not self.is_scored

    def prompt_attention(self) -> PromptAttention | None:
        """How its prompt is attended; None: densely."""
        return self.policy.prompt_attention(self.plan) if self.plan.selects else None

    def take(self, token_id: int) -> None:
        """A sampled token: part of the answer, and the input of the next step. Raises RequestError where the answer's
        constraint cannot go on."""
        self.generated.append(token_id)
        self.next_token = token_id
        self.sampler.append(token_id)

    @property
    def reason_to_end(self) -> FinishReason | None:
        """Why nothing may follow the token that was sampled last; None: something may."""
        if self.next_token in self.sampler.end_token_ids or self.sampler.is_complete:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output >= self.request.sampling.max_tokens else None

    def preempt(self) -> None:
        """Wait again, with all tokens and nothing that was computed of them; its seat, slots and slabs are freed.

        Where everything is attended the answer so far is prefilled with the prompt. Else its rows and what was kept
        follow from what each step chose: the same steps are made again, and give the same tokens.
        """
        first = self.request.num_prefill_tokens or len(self.request.prompt_token_ids)
        if self.plan.selects:
            self.forced = deque((*self.request.prompt_token_ids[first:], *self.generated))
        else:
            self.num_prefill = self.known_tokens
            self.forced.clear()
        self.was_preempted = True
        self.is_prefilled = False
        self.names = self.resident = self.left = None
        self.next_token = -1
        self.num_tokens = self.num_cached = self.num_slots = self.num_backed = 0
        self.window_begin = self.policy.window_begin(self.plan, first)
        self.leaving = -1
        self.offloads = False
        self.kept = Kept()
        self.mark = 0

    def begin_again(self) -> None:
        """Wait again, with a prompt that is computed in vain. Where a token was forced behind it, that is so again; a
        sampled one was not taken yet."""
        if self.next_token >= 0:
            self.forced.appendleft(self.next_token)
            self.next_token = -1

    @property
    def _recalls(self) -> bool:
        return self.policy.family is Family.RECALL and self.plan.selects

    @property
    def can_miss(self) -> bool:
        """Return whether a token that it selects may be in the arena only."""
        return self._recalls and self.num_slots < self.capacity

    @property
    def grows_resident(self) -> bool:
        """Return whether it recalls, is fully resident, and takes its slots as it grows: most answers that may fill the
        context are short."""
        return self._recalls and self.is_open_ended and not self.can_miss

    @property
    def held_slots(self) -> int:
        """Slots of each head in its layers that recall."""
        return self.num_backed if self.grows_resident else self.num_slots

    @property
    def is_compressed(self) -> bool:
        """Return whether its layers keep a part of their tokens only."""
        return self.policy.family is Family.RETAIN and self.plan.selects

    @property
    def num_fixed(self) -> int:
        """Sinks, window and new token, at most: what is attended whatever is selected."""
        return self.plan.num_sink + self.ring_size

    @property
    def ring_column(self) -> int:
        """The new token's place among the fixed slots; -1 where nothing is selected."""
        return self.plan.num_sink + self.num_tokens % self.ring_size if self.ring_size else -1

    def usage(self, device_bytes: int = 0, host_bytes: int = 0) -> Usage:
        """Return the usage of the request, without its times. Means are over KV heads, layers and decode steps.

        device_bytes, host_bytes: that it holds now.
        """
        meter = self.meter
        steps = max(1, meter.num_layer_steps)
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=self.num_output,
            cached_tokens=self.num_reused,
            policy=self.policy.name,
            budget_tokens=self.plan.budget_tokens,
            context_tokens=len(self.request.prompt_token_ids) + self.num_output,
            offloaded_tokens=self.num_tokens if self.offloads else 0,
            attended_tokens=meter.attended_tokens / steps,
            window_tokens=meter.window_tokens / steps,
            hit_rate=1 - meter.missed_rows / meter.selected_rows if meter.selected_rows else 1.0,
            bytes_moved=self.fetched_bytes,
            attention_mass=meter.attention_mass / meter.num_measured if meter.num_measured else None,
            # Where nothing is selected, as under StreamingLLM, there is nothing to find.
            recall_rate=meter.recall_rate / meter.num_measured
            if meter.num_measured and self.plan.num_selected != 0
            else None,
            best_recall=meter.best_recall / meter.num_measured if meter.num_measured else None,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
        )


def ring_size(policy: Policy, plan: Plan) -> int:
    """Window tokens and the new one, at most, where a sequence selects."""
    return policy.max_window(plan) + 1 if plan.selects else 0
