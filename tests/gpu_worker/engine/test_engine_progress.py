"""Events, counters and gauges that the engine gives of prompts while it computes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_rig import Record, Rig, random_prompt, request

from gpu_worker.engine.outbox import Outbox
from gpu_worker.engine.request import Status
from gpu_worker.records import GenerationRequest, ProgressEvent
from gpu_worker.runner.steps.decode import StepResult
from gpu_worker.runner.steps.drawing import FirstTokens
from gpu_worker.state.sequence import Sequence


def progress(record: Record) -> list[ProgressEvent]:
    return [event for event in record.events if isinstance(event, ProgressEvent)]


def from_caller(name: bytes, one: GenerationRequest) -> GenerationRequest:
    return replace(one, prefix_salt=name)


@pytest.mark.parametrize("policy", ["full", "pqcache"])
def test_prompt_tokens_are_counted_chunk_by_chunk(policy: str) -> None:
    rig = Rig(prefill_chunk=25)
    rig.submit(request("one", policy, 0.5))
    totals = []
    while not rig.records["one"].tokens:
        rig.step()
        totals.append(rig.engine.stats().prompt_tokens_total)
        assert totals[-1] == progress(rig.records["one"])[-1].computed_tokens
    # Five chunks in each of three layers, a fifteenth of 120 tokens each; the fifth has 20 tokens.
    assert totals[:5] == [8, 16, 25, 33, 40]
    assert totals[-1] == 120
    rig.drain()
    assert rig.engine.stats().prompt_tokens_total == 120


def test_a_prompt_that_is_aborted_counts_what_it_had() -> None:
    rig = Rig(prefill_chunk=25)
    rig.submit(request("one"))
    rig.step(3)
    rig.engine.abort("one")
    assert rig.engine.stats().prompt_tokens_total == 25
    rig.run(request("two", prompt=30))
    stats = rig.engine.stats()
    assert stats.prompt_tokens_total == 55
    assert (stats.prefilling, stats.prefilling_tokens, stats.prefilling_tokens_left) == (0, 0, 0)


def test_prompt_tokens_that_go_through_decode_steps_count_too() -> None:
    rig = Rig()
    rig.submit(request("one", num_prefill=60))
    rig.step_to("one", Status.DECODE)
    assert 60 <= rig.engine.stats().prompt_tokens_total < 120
    rig.drain()
    assert rig.engine.stats().prompt_tokens_total == 120


def test_gauges_tell_the_prompts_in_progress_and_those_that_wait() -> None:
    rig = Rig(prefill_chunk=25, max_num_seqs=2)
    rig.submit(
        from_caller(b"a", request("long", prompt=300)),
        from_caller(b"b", request("longer", prompt=400)),
    )
    # Callers share, so that both are begun soon.
    rig.step_until(lambda: rig.engine.stats().prefilling == 2, most=10)
    rig.submit(request("third", prompt=random_prompt(70)))
    rig.step(5)
    stats = rig.engine.stats()
    done = sum(progress(rig.records[name])[-1].computed_tokens for name in ("long", "longer"))
    assert (stats.running, stats.prefilling, stats.prefilling_tokens) == (2, 2, 700)
    assert 0 < stats.prefilling_tokens_left == 700 - done
    assert (stats.waiting, stats.waiting_tokens) == (1, 70)
    rig.drain()
    stats = rig.engine.stats()
    assert (stats.prefilling, stats.prefilling_tokens_left, stats.waiting_tokens) == (0, 0, 0)


def test_a_first_token_is_told_before_the_next_step_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: tokens come later than they are asked for, and events are held back beside a step."""
    monkeypatch.setattr("gpu_worker.startup.assemble.Outbox", lambda holds: Outbox(holds=True))
    monkeypatch.setattr(FirstTokens, "is_there", lambda self, sequence, wait: wait)
    rig = Rig()
    rig.submit(request("one"))
    run, told = rig.runner.decode.run, list[int]()

    def queue_step(sequences: list[Sequence], *drawn: torch.Tensor | None) -> StepResult:
        told.append(len(rig.records["one"].tokens))
        return run(sequences, *drawn)

    monkeypatch.setattr(rig.runner.decode, "run", queue_step)
    rig.drain()
    # Each step that follows has begun when the one before it is told.
    assert told[:3] == [1, 1, 2]
