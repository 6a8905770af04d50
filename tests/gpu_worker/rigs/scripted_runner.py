"""A runner of numbers alone: what the engine decides is tested without a model, a device or a store."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gpu_worker.engine.admission import Admission
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.outbox import Outbox
from gpu_worker.engine.pace import Pace
from gpu_worker.engine.patience import Patience
from gpu_worker.engine.preemption import Preemption
from gpu_worker.engine.prompt_room import PromptRoom
from gpu_worker.engine.request import Status
from gpu_worker.engine.scheduler import Scheduler
from gpu_worker.errors import ArenaFull, NeverFits, StoreSilent, WorkerError
from gpu_worker.records import (
    Budget,
    EngineInfo,
    Event,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
    Usage,
)
from gpu_worker.records.plans import (
    Admit,
    Admitted,
    BeginStep,
    Entered,
    Failure,
    Leaving,
    Measured,
    Outcome,
    Pass,
    Release,
    Released,
    RunnerStats,
    RunQuantum,
    Then,
    Token,
    WorkKind,
)

CHUNK, MAX_LEN = 100, 4000


@dataclass
class Place:
    """A request's place: tokens of its prompt that are computed, of its answer, and what it holds."""

    asked: GenerationRequest
    num_computed: int = 0
    num_output: int = 0
    slots: int = 0
    arena: int = 0
    runs: bool = False

    @property
    def known(self) -> int:
        return len(self.asked.prompt_token_ids) + self.num_output


@dataclass
class ScriptedRunner:
    """Slots and arena in tokens. The policy `recalls` needs the arena, and any but `full` may select.

    A quantum computes `CHUNK` tokens.

    fails: errors of the next steps, by request. plans: the verbs in their order, with the requests concerned.
    """

    slots: int = 10_000
    arena: int = 10_000
    silent_seconds: float = 0.0
    is_store_reachable: bool = True
    fails: dict[str, WorkerError] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    places: dict[str, Place] = field(default_factory=dict)
    plans: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    passes: dict[int, list[str]] = field(default_factory=dict)
    steps: dict[int, list[str]] = field(default_factory=dict)
    first: deque[str] = field(default_factory=deque)

    def _note(self, verb: str, *names: str) -> None:
        self.plans.append((verb, names))

    @property
    def free_slots(self) -> int:
        return self.slots - sum(one.slots for one in self.places.values())

    @property
    def free_arena(self) -> int:
        return self.arena - sum(one.arena for one in self.places.values())

    @property
    def num_free_slots(self) -> int:
        return self.free_slots

    def enter(self, request: GenerationRequest) -> Entered:
        num_prompt = len(request.prompt_token_ids)
        self.places[request.request_id] = Place(request)
        capacity = num_prompt + request.sampling.max_tokens
        return Entered(num_prompt, capacity, is_open_ended=False)

    def admit(self, plan: Admit) -> Admitted:
        place = self.places[plan.request_id]
        needed, is_recalled = place.known, place.asked.policy == "recalls"
        if needed > self.slots or (is_recalled and needed > self.arena):
            return Admitted(False, error=NeverFits(f"{needed} tokens"))
        if needed > self.free_slots:
            return Admitted(False)
        if is_recalled and self.silent_seconds:
            return Admitted(False, True, error=StoreSilent("silent"))
        if is_recalled and (not plan.may_open or needed > self.free_arena):
            return Admitted(False, True, missing_bytes=needed - self.free_arena)
        place.slots, place.arena, place.runs = needed, needed if is_recalled else 0, True
        self._note("admit", plan.request_id)
        return Admitted(True, is_recalled)

    def begin_prompts(self, request_ids: tuple[str, ...]) -> Outcome:
        number = len(self.passes)
        self.passes[number] = list(request_ids)
        self._note("begin_prompts", *request_ids)
        return Outcome(passes=[self._pass(number)])

    def _left(self, name: str) -> int:
        return self.places[name].known - self.places[name].num_computed

    def _pass(self, number: int) -> Pass:
        names = self.passes[number]
        left = sum(map(self._left, names))
        kind = WorkKind.SHORT if left <= CHUNK else WorkKind.LONG
        return Pass(
            number, dict.fromkeys(names, 1 / max(1, len(names))), min(left, CHUNK), kind, not left, False
        )

    def run_quantum(self, plan: RunQuantum) -> Outcome:
        room = CHUNK
        for name in self.passes[plan.number]:
            done = min(room, self._left(name))
            self.places[name].num_computed += done
            room -= done
        self._note("run_quantum", *self.passes[plan.number])
        return Outcome(passes=[self._pass(plan.number)], served=[*self.passes[plan.number]])

    def finish_prompts(self, waits: bool) -> Outcome:
        outcome = Outcome()
        for number, names in self.passes.items():
            done = [name for name in names if not self._left(name)]
            self.passes[number] = [name for name in names if name not in done]
            outcome.prefilled += done
            if done:
                outcome.passes.append(self._pass(number))
        outcome.tokens = [self._token(name) for name in outcome.prefilled]
        return outcome

    def keep_prompts(self) -> None:
        """Nothing is kept."""

    def load_indexes(self, waits: bool) -> Outcome:
        done = [name for name, one in self.places.items() if one.runs and one.num_output]
        return Outcome(ready=[] if self.silent_seconds else done)

    def retry_indexes(self, request_ids: tuple[str, ...]) -> None:
        """None fails."""

    def begin_step(self, plan: BeginStep) -> Outcome:
        outcome = Outcome(step=len(self.steps))
        taking: list[str] = []
        for name in plan.request_ids:
            place = self.places[name]
            if (error := self.fails.pop(name, None)) is not None:
                outcome.failed.append(Failure(name, error))
            elif place.arena and self.silent_seconds:
                outcome.silent.append(name)
            elif self.free_slots < 1:
                outcome.crowded.append(name)
            elif place.arena and self.free_arena < 1:
                outcome.short.append((name, ArenaFull("full", 1)))
            else:
                place.slots += 1
                place.arena += bool(place.arena)
                taking.append(name)
        self.steps[len(self.steps)] = taking
        self._note("begin_step", *taking)
        outcome.sampled, outcome.served, outcome.has_run = taking, taking, bool(taking)
        return outcome

    def _token(self, name: str) -> Token:
        place = self.places[name]
        place.num_output += 1
        is_last = place.num_output == place.asked.sampling.max_tokens
        place.num_computed = place.known
        return Token(name, TokenEvent(place.num_output), reason=FinishReason.LENGTH if is_last else None)

    def is_reached(self, step: int) -> bool:
        return True

    def take_tokens(self, step: int) -> Outcome:
        names, self.steps[step] = self.steps[step], []
        return Outcome(tokens=[self._token(name) for name in names if self.places[name].runs])

    def end_step(self, step: int) -> float:
        return 0.001

    def settle(self) -> list[Measured]:
        return [Measured(CHUNK, kind, 0.010) for kind in WorkKind]

    def release(self, plan: Release) -> Released:
        place = self.places[plan.request_id]
        had_arena, num_known = bool(place.arena), place.known
        passes = []
        for number, names in self.passes.items():
            if plan.request_id in names:
                names.remove(plan.request_id)
                passes.append(self._pass(number))
        self._note(plan.then.name.lower(), plan.request_id)
        place.slots = place.arena = place.num_computed = 0
        place.runs = False
        if plan.then is Then.END:
            del self.places[plan.request_id]
        return Released(Usage(), had_arena, num_prefill=num_known, passes=tuple(passes))

    def finds_room(self, plan: Leaving) -> bool:
        leaving = [self.places[name] for name in plan.leaving]
        slots = self.free_slots + sum(one.slots for one in leaving)
        arena = sum(one.arena for one in leaving)
        return self.places[plan.request_id].known <= slots and arena >= plan.missing_bytes

    def without_slots(self, request_ids: tuple[str, ...]) -> list[str]:
        return [*request_ids] if self.free_slots < 1 else []

    def spread_slots(self) -> None:
        """None miss any."""

    def holders(self) -> list[str]:
        return [name for name, one in self.places.items() if one.arena]

    def is_freeing(self) -> bool:
        return False

    def leave_arena(self, request_id: str) -> bool:
        return False

    def drop_copies(self) -> bool:
        return False

    def readers(self, missing_bytes: int) -> list[str]:
        return []

    def renew_store(self) -> tuple[str, ...]:
        lost, self.lost = self.lost, ()
        return lost

    def stats(self) -> RunnerStats:
        return RunnerStats()

    def reset_counts(self) -> None:
        """None counts."""

    def close(self) -> None:
        """Holds nothing."""


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Decisions:
    """An engine over a scripted runner, and the events of its requests."""

    def __init__(self, max_num_seqs: int = 8, **options: int) -> None:
        self.runner, self.clock = ScriptedRunner(**options), Clock()
        room, pace = PromptRoom(MAX_LEN, CHUNK), Pace(itl_seconds=0.025)
        self.scheduler = Scheduler(max_num_seqs, room, lambda request: request.num_prefill / 1e4)
        preemption = Preemption(self.scheduler, self.runner)
        info = EngineInfo(
            "m", "m", "cpu", "float32", 9, MAX_LEN, max_num_seqs, (), ("full",), "full", Budget(1.0), 0, 0, ""
        )
        self.engine = Engine(
            info,
            self.runner,
            self.scheduler,
            Admission(self.scheduler, preemption, self.runner, MAX_LEN, max_joining=CHUNK),
            preemption,
            Patience(10.0, self.clock),
            pace,
            Outbox(holds=False),
        )
        self.events: dict[str, list[Event]] = {}

    def submit(
        self, name: str, num_prompt: int = 50, max_tokens: int = 5, policy: str = "full", **more: Any
    ) -> None:
        """Submit a request of so many tokens. more: fields of the request."""
        sampling = SamplingParams(max_tokens)
        asked = GenerationRequest(name, (0,) * num_prompt, sampling, policy, Budget(share=1.0), **more)
        self.events[name] = []
        self.engine.submit(asked, self.events[name].append)

    def run(self, most: int = 500) -> None:
        for _ in range(most):
            if not self.engine.has_work:
                return
            self.engine.step()
        raise AssertionError(f"{self.scheduler.all()} left after {most} steps")

    def tokens(self, name: str) -> list[int]:
        return [one.token_id for one in self.events[name] if isinstance(one, TokenEvent)]

    def status(self, name: str) -> Status:
        found = self.scheduler.find(name)
        return Status.FINISHED if found is None else found.status

    def times(self, verb: str) -> list[tuple[str, ...]]:
        """The requests of each plan of this verb, in their order."""
        return [names for done, names in self.runner.plans if done == verb]
