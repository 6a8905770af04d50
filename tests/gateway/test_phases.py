from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import Metrics
from gateway.progress import Phases

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
