"""How likely a prompt's own tokens are is told as one pass over the whole prompt says it."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from dense_forward import dense_forward
from engine_rig import Record, Rig, make_model, random_prompt, request
from live_bytes import LiveBytes
from offload_rig import make_sequence

from gpu_worker.engine.request import Status
from gpu_worker.errors import WorkerError
from gpu_worker.models import Decoder
from gpu_worker.records import GenerationRequest, PromptEvent, TokenEvent
from gpu_worker.runner.prompts import prompt_memory
from gpu_worker.runner.prompts.base import WorkKind
from gpu_worker.runner.prompts.captured import ShortPass
from gpu_worker.runner.prompts.in_progress import PrefillChoice
from gpu_worker.runner.prompts.layered import Prefill, PromptScores
from gpu_worker.state.sequence import Sequence


def scored(one: GenerationRequest, num_top: int) -> GenerationRequest:
    return replace(one, sampling=replace(one.sampling, prompt_logprobs=num_top))


def told(record: Record) -> PromptEvent:
    kinds = [type(event) for event in record.events]
    assert PromptEvent not in kinds[kinds.index(TokenEvent) :]
    (event,) = [event for event in record.events if isinstance(event, PromptEvent)]
    return event


def test_each_token_of_a_prompt_is_scored_after_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # of few tokens at once
    monkeypatch.setattr(prompt_memory, "LOGIT_BYTES", 4 * 97 * 5)
    rig = Rig(reuses_prefixes=True, max_joining=64)
    prompts = {
        "long": ("full", 150), "packed": ("full", 20), "beside": ("full", 30), "recalled": ("pqcache", 140),
        "one": ("full", 1),
    }  # fmt: skip
    requests = [
        scored(request(name, policy, 0.25, prompt=random_prompt(length, length), max_tokens=3), 2)
        for name, (policy, length) in prompts.items()
    ]
    plain = replace(
        requests[0], request_id="plain", sampling=replace(requests[0].sampling, prompt_logprobs=None)
    )
    rig.run(plain)
    # what is known of the prompt is computed again
    for one, record in zip(requests, rig.run(*requests), strict=True):
        ids = torch.tensor(one.prompt_token_ids)
        expected = dense_forward(rig.model.decoder, ids).log_softmax(-1)[:-1]
        scores = told(record)
        assert scores.token_ids == one.prompt_token_ids[1:]
        own, top = expected.gather(-1, ids[1:, None]), expected.topk(2)
        logprobs = torch.cat([own, top.values], -1)
        torch.testing.assert_close(torch.tensor(scores.logprobs), logprobs, rtol=0, atol=2e-5)
        ranks = 1 + (expected > own).sum(-1, keepdim=True)
        assert scores.numbers.tolist() == torch.cat([ranks, top.indices], -1).tolist()
        assert record.usage.cached_tokens == 0
        assert len(record.tokens) == 3
    assert rig.records["plain"].tokens == rig.records["long"].tokens
    # who does not ask takes what is known
    rig.submit(replace(plain, request_id="again"))
    rig.drain()
    assert rig.records["again"].usage.cached_tokens == 128


def test_the_first_quantum_that_is_scored_has_an_iteration_for_itself() -> None:
    iterations: list[list[WorkKind]] = []

    class Noted(Prefill):
        def advance(self, wait: bool = True) -> list[tuple[Sequence, WorkerError]]:
            if self.next_work:
                iterations[-1].append(self.next_kind)
            return super().advance(wait)

    rig = Rig(make_prefill=Noted, itl_seconds=60.0)
    rig.submit(scored(request("one", "full", prompt=random_prompt(300, 1)), 1))
    while not rig.records["one"].tokens:
        iterations.append([])
        rig.step()
    of_scores = [kinds for kinds in iterations if WorkKind.SCORED in kinds]
    # What it takes is known then, and the others come together.
    assert of_scores[0] == [WorkKind.SCORED]
    assert len(of_scores[1]) > 1
    assert {*of_scores[1]} == {WorkKind.SCORED}
    assert WorkKind.LONG in iterations[0]


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_what_is_planned_for_scores_is_enough(num_top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_memory, "LOGIT_BYTES", 1 << 16)
    monkeypatch.setattr(prompt_memory, "GPU_TOKENS", 1)
    vocab_size, hidden = 256, torch.randn(90, 8, dtype=torch.bfloat16)
    head = torch.randn(8, vocab_size, dtype=torch.bfloat16)
    decoder = SimpleNamespace(
        config=SimpleNamespace(vocab_size=vocab_size),
        device=hidden.device,
        logits=lambda rows: (rows @ head).float(),
    )
    scores = PromptScores(make_sequence("one", 0, 91), cast(Decoder, decoder), num_top)
    with torch.inference_mode(), LiveBytes(hidden, head) as live:
        scores.take(hidden, 0)
    assert 1 << 16 < live.peak <= prompt_memory.scoring_bytes(90, vocab_size)


def test_telling_takes_no_more_of_the_engines_thread_for_a_long_prompt() -> None:
    """Lines of Python that run, whichever: what is made of each token runs some for each."""

    def lines_to_tell(num_tokens: int) -> int:
        decoder = SimpleNamespace(config=SimpleNamespace(vocab_size=97), device=torch.device("cpu"))
        scores = PromptScores(make_sequence("one", 0, num_tokens), cast(Decoder, decoder), 5)
        num_lines = 0

        def count(*_: Any) -> Any:
            nonlocal num_lines
            num_lines += 1
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            scores.take_event()
        finally:
            sys.settrace(before)
        return num_lines

    assert 0 < lines_to_tell(2) == lines_to_tell(200)


def test_short_prompts_are_scored_too() -> None:
    model = make_model()
    rig = Rig(model, make_prefill=PrefillChoice(ShortPass(model.decoder, 64)))
    record = rig.run(scored(request("asks", prompt=24), 0))[0]
    assert len(told(record).logprobs) == 23
    assert rig.tokens(request("does not", prompt=24)) == record.tokens


def test_one_that_is_scored_fills_more_than_half_a_chunk_with_others() -> None:
    one, other = request("one", prompt=90, max_tokens=2), request("other", prompt=100, max_tokens=2)
    rig = Rig(prefill_chunk=300, max_joining=300)
    expected = told(rig.run(scored(one, 1))[0])
    rig.submit(scored(replace(one, request_id="packed"), 1), other)
    rig.step()
    assert len(rig.runner.prefills) == 2
    rig.drain()
    scores = told(rig.records["packed"])
    np.testing.assert_array_equal(scores.numbers, expected.numbers)
    np.testing.assert_allclose(scores.logprobs, expected.logprobs, rtol=0, atol=2e-5)
    assert rig.records["other"].tokens == Rig().tokens(other)


def test_a_prompt_that_gave_way_after_it_was_scored_tells_nothing_twice() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit(scored(request("low", prompt=40, max_tokens=30), 0))
    rig.submit(replace(rig.sequence("low").request, request_id="other", priority=5))
    rig.step_to("low", Status.DECODE, 3)
    rig.submit(replace(request("first", prompt=40), priority=-5))
    rig.drain()
    assert len(told(rig.records["low"]).logprobs) == 39
    assert rig.engine.stats().preemptions_total > 0
