"""Delays that one caller's prompts cause another, by the work that they get meanwhile; the cost of later choices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_rig import Rig, request, tokens_alone

from gpu_worker.errors import WorkerError
from gpu_worker.records import GenerationRequest
from gpu_worker.runner.prompts.layered import Prefill
from gpu_worker.state.sequence import Sequence

STRETCH = 4.0
LENGTH = 512
# Two slabs and more.
PROMPT = 150


class Meter:
    """Makes prefills that note their work, quantum by quantum."""

    def __init__(self) -> None:
        self.quanta: list[tuple[str, float]] = []

    def make(self, *arguments: object) -> Prefill:
        meter = self

        class Metered(Prefill):
            def advance(self, wait: bool = True) -> list[tuple[Sequence, WorkerError]]:
                for prompt in self.prompts:
                    meter.quanta.append((prompt.sequence.sequence_id, prompt.share * self.next_work))
                return super().advance(wait)

        return Metered(*arguments)  # type: ignore[arg-type]

    def work(self, *names: str) -> float:
        """Return the work of these requests; without a name, of all."""
        return sum(work for name, work in self.quanta if not names or name in names)


def of(caller: bytes, name: str, prompt: int) -> GenerationRequest:
    return replace(request(name, prompt=prompt, max_tokens=2), prefix_salt=caller)


@pytest.mark.parametrize(("num_others", "length"), [(3, LENGTH // 16), (6, LENGTH)])
def test_prompts_of_one_caller_delay_anothers_by_no_more_than_the_stretch(
    num_others: int, length: int
) -> None:
    meter = Meter()
    rig = Rig(make_prefill=meter.make, stretch=STRETCH)
    rig.submit(*(of(b"many", f"many {number}", LENGTH) for number in range(num_others)))
    # Quanta are measured by now.
    rig.step(6)
    begun = len(meter.quanta)
    rig.submit(of(b"one", "one", length))
    rig.step_until(lambda: rig.records["one"].tokens)
    meter.quanta = meter.quanta[begun:]
    # A quantum of others may be under way.
    largest = max(work for _, work in meter.quanta)
    assert meter.work() <= STRETCH * meter.work("one") + largest
    rig.drain()
    assert all(record.complete for record in rig.records.values())


@pytest.mark.parametrize(("policy", "budget"), [("pqcache", 0.25), ("clusterkv", 0.25), ("full", 1.0)])
def test_choices_that_begin_at_the_firsts_token_answer_as_alone_and_take_its_prompt(
    policy: str, budget: float
) -> None:
    """Submit choices as the gateway does for `n`."""

    def choice(number: int) -> GenerationRequest:
        one = request(f"choice {number}", policy, budget, prompt=PROMPT, max_tokens=8)
        return replace(one, sampling=replace(one.sampling, temperature=1.0, seed=10 + number))

    alone = [tokens_alone(choice(number)) for number in range(3)]
    meter = Meter()
    rig = Rig(make_prefill=meter.make, reuses_prefixes=True, tokens_per_slab=64)
    rig.submit(choice(0))
    rig.step_until(lambda: rig.records["choice 0"].tokens)
    rig.submit(choice(1), choice(2))
    rig.drain()
    records = [rig.records[f"choice {number}"] for number in range(3)]
    assert [record.tokens for record in records] == alone
    assert len({tuple(tokens) for tokens in alone}) == 3
    if policy != "full":
        assert [record.usage.cached_tokens for record in records] == [0, 128, 128]
        assert meter.work("choice 1", "choice 2") < meter.work("choice 0")
