"""The policy `auto`: what it becomes, when, and what is reported."""

from __future__ import annotations

import pytest
import torch
from engine_rig import Rig, pool_of, request, tokens_alone

from gpu_worker.engine.request import Status
from gpu_worker.policies.base import CacheShape
from gpu_worker.records import Budget
from gpu_worker.startup.auto_length import FEW_TOKENS, SELECTION_SECONDS, max_full_tokens
from kv_store.client import RowFormat

ROW_BYTES, CODE_BYTES, NUM_HEADS = 512, 2, 8


def shape(max_num_seqs: int) -> CacheShape:
    return CacheShape(max_num_seqs, 32, NUM_HEADS, 4, RowFormat(128), 131072, 1.0, torch.device("cpu"))


@pytest.mark.parametrize("budget", [Budget(share=0.1), Budget(tokens=2048)])
@pytest.mark.parametrize("max_num_seqs", [1, 4, 8])
def test_the_longest_whole_context_takes_as_long_as_selecting(budget: Budget, max_num_seqs: int) -> None:
    bandwidth = 4e12
    length = max_full_tokens(shape(max_num_seqs), budget, CODE_BYTES, bandwidth)
    assert FEW_TOKENS < length < 131072
    whole = max_num_seqs * NUM_HEADS * length * ROW_BYTES
    selected = max_num_seqs * NUM_HEADS * (budget.resolve(length) * ROW_BYTES + length * CODE_BYTES)
    assert whole / bandwidth == pytest.approx(selected / bandwidth + SELECTION_SECONDS, rel=0.01)


def test_the_longest_whole_context_has_bounds() -> None:
    assert max_full_tokens(shape(256), Budget(share=0.1), CODE_BYTES, 4e12) == FEW_TOKENS
    assert max_full_tokens(shape(1), Budget(share=1.0), CODE_BYTES, 4e12) == 131072
    assert max_full_tokens(shape(1), Budget(tokens=2**20), CODE_BYTES, 4e12) == 131072


def test_a_short_request_attends_everything_and_a_long_one_selects() -> None:
    rig = Rig(max_full_tokens=130)
    assert "auto" in rig.engine.info.policies
    short = request("short", "auto", 0.3, prompt=120, max_tokens=10)
    long = request("long", "auto", 0.3, prompt=131, max_tokens=10)
    records = rig.run(short, long)
    assert [record.usage.policy for record in records] == ["full", "bitkeys"]
    assert records[0].usage.budget_tokens == 120
    assert records[1].usage.budget_tokens == 39
    for one, record, policy in zip((short, long), records, ("full", "bitkeys"), strict=True):
        alone = request("alone", policy, 0.3, prompt=len(one.prompt_token_ids), max_tokens=10)
        assert tokens_alone(alone) == record.tokens
    rig.check_empty()


@pytest.mark.parametrize(("max_tokens", "policy"), [(136, "full"), (137, "bitkeys")])
def test_a_short_prompt_with_a_long_answer_may_have_half_of_the_free_slots(
    max_tokens: int, policy: str
) -> None:
    rig = Rig(max_full_tokens=130, slot_bytes=pool_of(8))
    # 256 tokens: four of the eight blocks of 64 slots
    record = rig.run(request("chat", "auto", 0.3, prompt=120, max_tokens=max_tokens))[0]
    assert record.usage.policy == policy
    rig.check_empty()


def test_a_short_request_selects_where_slots_are_few() -> None:
    rig = Rig(slot_bytes=pool_of(8))
    rig.submit(
        request("first", prompt=300, max_tokens=84), request("second", "auto", 0.1, prompt=300, max_tokens=40)
    )
    rig.step_to("second", Status.DECODE)
    rig.run(request("third", "auto", 0.1, prompt=100, max_tokens=20))
    first, second, third = (rig.records[name] for name in ("first", "second", "third"))
    assert [one.usage.policy for one in (first, second, third)] == ["full", "bitkeys", "bitkeys"]
    # Its plan is the chosen policy's in every part.
    assert second.tokens == tokens_alone(request("alone", "bitkeys", 0.1, prompt=300, max_tokens=40))
    later = rig.run(request("later", "auto", 0.1, prompt=300, max_tokens=9))[0]
    assert later.usage.policy == "full"
    rig.check_empty()
