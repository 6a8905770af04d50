"""Tokens after prompts: drawn when these are computed, taken one by one, and forgotten with their sequence."""

from __future__ import annotations

import torch
from device_reads import DeviceReads
from offload_rig import make_sequence

from gpu_worker.records import TokenEvent
from gpu_worker.runner.steps.drawing import FirstTokens, Sampling
from gpu_worker.sampling import Choice, Sampler, SamplerState


class SlowChoice(Choice):
    """Is there once it is waited for."""

    reached = False

    @property
    def is_reached(self) -> bool:
        return self.reached

    def wait(self) -> None:
        self.reached = True


class SlowSampler(Sampler):
    def begin(  # type: ignore[override]
        self, logits: torch.Tensor, states: list[SamplerState], num_coming: int = 0
    ) -> Choice:
        token_ids, bits = logits.argmax(dim=-1), logits.amax(dim=-1).view(torch.int32)
        return SlowChoice(token_ids, torch.cat([token_ids, bits]), None)


def test_each_takes_its_own_token_once_it_is_there() -> None:
    first_tokens = FirstTokens(Sampling(SlowSampler()))
    early, late, forced = (
        make_sequence(name, seat, 5) for seat, name in enumerate(("early", "late", "forced"))
    )
    forced.forced.append(3)
    logits = torch.zeros(2, 9)
    logits[0, 4] = 1.0
    logits[1, 6] = torch.nan
    first_tokens.draw([early, late], logits)
    first_tokens.draw([forced], torch.zeros(1, 9))
    assert len(first_tokens) == 2
    assert not first_tokens.is_there(early, wait=False)
    assert first_tokens.is_there(forced, wait=False)
    assert first_tokens.take(forced) == []
    assert forced.next_token == 3
    assert first_tokens.is_there(late, wait=True)
    assert first_tokens.is_there(early, wait=False)
    assert first_tokens.take(late) == [(late, None)]
    assert first_tokens.take(early) == [(early, TokenEvent(4))]
    assert len(first_tokens) == 0


def test_who_is_drawn_beside_forced_tokens_makes_the_host_wait_for_nothing() -> None:
    first_tokens = FirstTokens(Sampling(SlowSampler()))
    forced, drawn = make_sequence("forced", 0, 5), make_sequence("drawn", 1, 5)
    forced.forced.append(3)
    with DeviceReads() as reads:
        first_tokens.draw([forced, drawn], torch.eye(9)[6:8])
    assert not reads.found
    assert first_tokens.take(drawn) == [(drawn, TokenEvent(7))]


def test_one_that_gave_way_is_drawn_anew() -> None:
    first_tokens = FirstTokens(Sampling(SlowSampler()))
    sequence = make_sequence("one", 0, 5)
    first_tokens.draw([sequence], torch.eye(9)[2:3])
    first_tokens.forget(sequence)
    first_tokens.draw([sequence], torch.eye(9)[7:8])
    assert first_tokens.is_there(sequence, wait=True)
    assert first_tokens.take(sequence) == [(sequence, TokenEvent(7))]
