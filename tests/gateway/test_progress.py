"""Phases of a choice, and how far the prompts of a request are."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gateway.exchange import Prefilling
from gateway.metrics import Metrics
from gateway.progress import INTERVAL_S, Phases, PrefillProgress

NAMES = {
    "queue": "carrel_request_queue_time_seconds",
    "prefill": "carrel_request_prefill_time_seconds",
    "decode": "carrel_request_decode_time_seconds",
    "gap": "carrel_inter_token_latency_seconds",
    "mean gap": "carrel_request_time_per_output_token_seconds",
}


class Watched:
    """Phases of a choice whose clock the test moves, and what was observed of them."""

    def __init__(self) -> None:
        self.now = 50.0
        self._metrics = Metrics("tiny")
        self.phases = Phases(self._metrics, lambda: self.now)
        self.now += 7
        self.phases.enter_queue()

    def observed(self) -> dict[str, tuple[float, float]]:
        """Number and sum of what was observed, by name; what was not is left out."""
        families = text_string_to_metric_families(self._metrics.render(None).decode())
        values = {sample.name: sample.value for family in families for sample in family.samples}
        counts = {name: (values[f"{full}_count"], values[f"{full}_sum"]) for name, full in NAMES.items()}
        return {name: told for name, told in counts.items() if told[0]}


def test_each_phase_is_observed_when_it_ends() -> None:
    watched = Watched()
    watched.now += 2
    watched.phases.begin_prefill()
    assert watched.observed() == {"queue": (1, 2)}
    watched.now += 1
    watched.phases.begin_prefill()
    watched.now += 3
    watched.phases.take_token()
    assert watched.observed() == {"queue": (1, 2), "prefill": (1, 4)}
    for gap in (0.25, 0.75):
        watched.now += gap
        watched.phases.take_token()
    assert watched.observed()["gap"] == (2, 1)
    watched.now += 0.5
    watched.phases.end()
    assert watched.observed() == {
        "queue": (1, 2), "prefill": (1, 4), "decode": (1, 1.5), "gap": (2, 1), "mean gap": (1, 0.5)
    }  # fmt: skip


def test_an_answer_of_one_token_has_no_gap_and_one_of_none_was_not_decoded() -> None:
    watched = Watched()
    watched.phases.begin_prefill()
    watched.phases.end()
    assert set(watched.observed()) == {"queue"}
    watched.phases.take_token()
    watched.phases.end()
    assert set(watched.observed()) == {"queue", "prefill", "decode"}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_and_the_last_are_told_and_few_between() -> None:
    clock = Clock()
    progress = PrefillProgress([1000], 1, clock)
    told = []
    for computed in range(0, 901, 10):
        told.append(progress.take(0, computed, 100))
        clock.now += INTERVAL_S / 7.5
    accounts = [account for account in told if account is not None]
    assert (told[0], told[-1]) == (Prefilling(1000, 0, 100), Prefilling(1000, 900, 100))
    # Of ninety steps each eighth.
    assert len(accounts) == 2 + 90 // 8
    # The end is told once: the worker repeats it while copies are waited for.
    clock.now += 10
    assert progress.take(0, 900, 100) is None


def test_of_several_choices_of_a_prompt_the_furthest_counts() -> None:
    clock = Clock()
    progress = PrefillProgress([100, 40], 2, clock)

    def take(*event: int) -> Prefilling | None:
        clock.now += 2 * INTERVAL_S
        return progress.take(*event)

    assert take(0, 50, 0) == Prefilling(140, 50, 0)
    assert take(1, 20, 10) is None
    assert take(2, 8, 0) == Prefilling(140, 58, 0)
    assert take(1, 10, 64) == Prefilling(140, 18, 64)
    assert take(3, 40, 0) == Prefilling(140, 50, 64)


def test_it_never_falls() -> None:
    clock = Clock()
    progress = PrefillProgress([100], 1, clock)
    progress.take(0, 60, 0)
    clock.now += 2 * INTERVAL_S
    assert progress.take(0, 5, 0) is None
    assert progress.take(0, 100, 0) == Prefilling(100, 100, 0)
    # Computed again, with what was generated, because it had to give way.
    clock.now += INTERVAL_S
    assert progress.take(0, 120, 0) is None
