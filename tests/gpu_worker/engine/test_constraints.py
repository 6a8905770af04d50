"""Answers held to a constraint, in the batch: when it ends them, fails, is slow, or they give way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
from engine_rig import Rig, make_model, request

from gpu_worker.engine.request import Status
from gpu_worker.errors import RequestError
from gpu_worker.records import FinishReason, GenerationRequest

END = 0


@dataclass
class Saying:
    """Lets an answer be one of two tokens at each place, and then end. `fails_at`: the place that it refuses."""

    places: Sequence[tuple[int, int]]
    fails_at: int = -1
    is_ready: bool = True
    taken: list[int] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.taken) == len(self.places)

    def take(self, token_id: int) -> None:
        assert token_id in self.places[len(self.taken)]
        if len(self.taken) == self.fails_at:
            raise RequestError("it cannot go on", "the_field")
        self.taken.append(token_id)

    def allowed(self, vocab_size: int, end_token_ids: Collection[int]) -> npt.NDArray[np.int32]:
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[list(self.places[len(self.taken)])] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def constrained(one: GenerationRequest, saying: Saying) -> GenerationRequest:
    return replace(one, constraint=saying)


def places(length: int) -> list[tuple[int, int]]:
    return [(1 + at % 90, 2 + at % 90) for at in range(length)]


def test_an_answer_ends_where_nothing_may_follow_and_others_are_as_without_it() -> None:
    other = request("other", "pqcache", 0.25, prompt=100, max_tokens=20)
    alone = Rig().tokens(other)
    rig, saying = Rig(make_model(eos_token_ids=(END,))), Saying(places(9))
    one, beside = rig.run(constrained(request("one", max_tokens=50), saying), other)
    assert one.tokens == saying.taken
    assert (one.complete.finish_reason, one.complete.stop_token_id) == (FinishReason.STOP, None)
    assert one.usage.completion_tokens == 9
    assert beside.tokens == alone
    rig.check_empty()


def test_an_answer_that_cannot_go_on_fails_alone() -> None:
    rig = Rig()
    bad, good = rig.run(
        constrained(request("bad"), Saying(places(9), fails_at=4)),
        constrained(request("good"), Saying(places(9))),
    )
    assert isinstance(bad.error, RequestError)
    assert len(bad.tokens) == 4
    assert len(good.tokens) == 9
    rig.check_empty()


def test_nobody_waits_for_a_slow_constraint_but_where_there_are_no_others() -> None:
    rig, slow = Rig(), Saying(places(30))
    rig.submit(constrained(request("slow", max_tokens=30), slow), request("other", max_tokens=30))
    rig.step_to("slow", Status.DECODE, num_tokens=3)
    rig.step_to("other", Status.DECODE)
    slow.is_ready = False
    told, of_other = len(slow.taken), len(rig.records["other"].tokens)
    rig.step(4)
    assert (len(slow.taken), len(rig.records["other"].tokens)) == (told, of_other + 4)
    slow.is_ready = True
    rig.step(2)
    assert len(slow.taken) == told + 2
    slow.is_ready = False
    rig.drain()
    assert slow.is_complete


@pytest.mark.parametrize("policy", ["pqcache", "full"])
def test_an_answer_that_gave_way_goes_on_where_it_was(policy: str) -> None:
    one = request("one", policy, 0.3, prompt=100, max_tokens=40)
    alone, again = Saying(places(12)), Saying(places(12))
    Rig().run(constrained(one, alone))
    rig = Rig(max_num_seqs=1)
    rig.submit(constrained(one, again))
    rig.step_to("one", Status.DECODE, num_tokens=5)
    rig.submit(replace(request("first", max_tokens=4), priority=-1))
    rig.drain()
    assert rig.engine.stats().preemptions_total == 1
    assert again.taken == alone.taken == rig.records["one"].tokens
