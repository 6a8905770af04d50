"""Drives an engine through a job: dense attention first, then every policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gpu_worker.errors import WorkerError
from gpu_worker.fidelity.job import FULL, Job, Setting
from gpu_worker.fidelity.scores import Lane, OutputErrors, Scores
from gpu_worker.records import (
    Budget,
    CompleteEvent,
    ErrorEvent,
    Event,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
    Usage,
)
from gpu_worker.startup.assemble import Assembled

CHECK_SECONDS = 1.0
DENSE = Setting(FULL, 1.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """One document under one setting. budget: the setting's; None for dense attention.

    nll, kl: means over its forced tokens, in nats. agreement: share of them where
    the best token is that of dense attention. same_tokens: generated before the first that differs. attended: mean
    tokens of a KV head, layer and step, ClusterKV's window included. device_bytes, host_bytes: of its keys
    and values at the end. attention_mass, best_recall: as in a request's usage. output_errors: |o - e| / |e| by layer
    and query head, o its output and e that of exact attention over its own keys and values, mean over steps; these
    three None where the document is not measured, and for what is dense or keeps means. error: why there is nothing
    else.
    """

    document: int
    policy: str
    budget: float | None
    num_scored: int = 0
    nll: float | None = None
    kl: float | None = None
    agreement: float | None = None
    same_tokens: int | None = None
    attended: float | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    attention_mass: float | None = None
    best_recall: float | None = None
    output_errors: tuple[tuple[float, ...], ...] | None = None
    error: str | None = None


@dataclass(slots=True)
class _Answer:
    name: str
    tokens: list[int] = field(default_factory=list)
    usage: Usage | None = None
    error: Exception | None = None

    @property
    def is_ended(self) -> bool:
        return self.usage is not None or self.error is not None

    def take(self, event: Event) -> None:
        match event:
            case TokenEvent(token_id):
                self.tokens.append(token_id)
            case CompleteEvent(_, usage):
                self.usage = usage
            case ErrorEvent(error):
                self.error = error


class Fidelity:
    """Measures a job with an engine of its own."""

    def __init__(self, worker: Assembled, job: Job, is_over: Callable[[], bool] = lambda: False) -> None:
        """is_over: asked before every group of documents, and of settings; nothing more is measured then."""
        self._engine, self._runner = worker.engine, worker.runner
        self._job = job
        self._is_over = is_over
        self._num_requests = 0
        self._errors = OutputErrors()
        worker.runner.caches.recall.probe.watch = self._errors.note
        self._checked_at = time.monotonic()

    def run(self) -> Iterator[list[Measured]]:
        """Measure some documents, under dense attention first, then under each setting in turn."""
        job = self._job
        for begin in range(0, len(job.documents), job.num_together):
            indexes = range(begin, min(begin + job.num_together, len(job.documents)))
            yield from self._measure(indexes)

    def _measure(self, indexes: Sequence[int]) -> Iterator[list[Measured]]:
        job, info = self._job, self._engine.info
        settings = (DENSE, *job.settings)
        scores = Scores(
            len(indexes) * len(settings),
            len(indexes),
            job.num_forced - 1,
            info.vocab_size,
            self._runner.pool.rows.device,
        )
        self._runner.decode.watch = scores.note
        generated: dict[int, list[int]] = {}
        for number, setting in enumerate(settings):
            if self._is_over():
                return
            forced, free = self._ask(indexes, setting, number * len(indexes), scores)
            found = []
            for place, index in enumerate(indexes):
                if setting is DENSE:
                    generated[index] = free[place].tokens
                same = _common(free[place].tokens, generated[index])
                found.append(
                    self._measured(index, setting, forced[place], same, scores, number * len(indexes) + place)
                )
            yield found

    def _ask(
        self, indexes: Sequence[int], setting: Setting, first: int, scores: Scores
    ) -> tuple[list[_Answer], list[_Answer]]:
        """The answers of requests whose tokens are forced, and of those that generate, in the documents' order."""
        forced, free, job = [], [], self._job
        for place, index in enumerate(indexes):
            document = job.documents[index]
            num_context = len(document) - job.num_forced
            lane = Lane(document, num_context, first + place, place, setting is DENSE)
            scores.add(name := self._name(), lane)
            is_measured = index in job.measured and setting is not DENSE
            forced.append(self._submit(name, setting, document, num_context, 1, is_measured))
            context = document[:num_context]
            free.append(self._submit(self._name(), setting, context, 0, job.num_generated))
        while not all(answer.is_ended for answer in (*forced, *free)):
            self._engine.step()
            if time.monotonic() - self._checked_at > CHECK_SECONDS:
                self._engine.check_store()
                self._checked_at = time.monotonic()
        return forced, free

    def _name(self) -> str:
        self._num_requests += 1
        return f"fidelity-{self._num_requests}"

    def _submit(
        self,
        request_id: str,
        setting: Setting,
        prompt: tuple[int, ...],
        num_prefill: int,
        num_tokens: int,
        is_measured: bool = False,
    ) -> _Answer:
        answer = _Answer(request_id)
        sampling = SamplingParams(max_tokens=max(1, num_tokens), temperature=0.0, ignore_eos=True)
        request = GenerationRequest(
            request_id,
            prompt,
            sampling,
            setting.policy,
            Budget.of(setting.budget),
            num_prefill_tokens=num_prefill,
            measure=is_measured,
        )
        try:
            self._engine.submit(request, answer.take)
        except (WorkerError, ValueError) as error:
            answer.error = error
        return answer

    def _measured(
        self, index: int, setting: Setting, forced: _Answer, same_tokens: int, scores: Scores, place: int
    ) -> Measured:
        head = (index, setting.policy, None if setting is DENSE else setting.budget)
        means, usage = scores.means(place), forced.usage
        if usage is None or means is None:
            return Measured(*head, error=str(forced.error or "a prediction is missing, or not finite"))
        return Measured(
            *head,
            self._job.num_forced - 1,
            *means,
            same_tokens if self._job.num_generated else None,
            usage.attended_tokens + usage.window_tokens,
            usage.device_bytes,
            usage.host_bytes,
            usage.attention_mass,
            usage.best_recall,
            self._errors.take(forced.name),
        )


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens they begin with alike."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
