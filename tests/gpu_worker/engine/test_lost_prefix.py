"""Known prefixes that prompts must do without after all: these are computed anew, and the answers are the same."""

from __future__ import annotations

from engine_rig import LAYOUT, Rig, random_prompt, request, tokens_alone
from offload_rig import attached

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.request import Status


def test_nobody_reaches_its_length_because_others_read_a_prefix() -> None:
    document = random_prompt(160, 1)
    one = request("one", "oracle", 0.3, prompt=random_prompt(150, 2), max_tokens=30)
    readers = [
        request(f"reader {seed}", prompt=(*document, *random_prompt(60, seed)), max_tokens=2)
        for seed in range(4)
    ]
    # An arena of 320 tokens, half of which the document fills: a slab has 16 tokens of one of three layers.
    with attached(LAYOUT, num_slabs=60) as (_, client):
        rig = Rig(client=client, reuses_prefixes=True, prefill_chunk=16, hot_cache=HotCacheSize(tokens=1))
        rig.run(request("document", prompt=document, max_tokens=1))
        rig.submit(one)
        rig.step_to("one", Status.DECODE)
        rig.submit(*readers)
        rig.drain()
        answers = {name: record.tokens for name, record in rig.records.items()}
        assert all(answers[each.request_id] == tokens_alone(each) for each in (one, *readers))
        assert rig.engine.stats().cached_tokens_total > 0
        assert not rig.runner.offloader.num_sequences
