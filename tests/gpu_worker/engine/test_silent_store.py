"""A store that is there and does not answer: who waits for it, who goes on, and what is left."""

from __future__ import annotations

from engine_rig import Rig, request, tokens_alone

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.request import Status
from kv_store.client import StoreSilent as NoAnswer

LEAST = HotCacheSize(tokens=1)
STAGES = [Status.WAITING, Status.PREFILL, Status.INDEXING, Status.DECODE]
FULL = request("full", max_tokens=60)
# Its rows fill a slab more after 8 tokens.
RECALLS = request("recalls", "pqcache", 0.3, max_tokens=40)


def test_a_store_that_begins_a_sequence_and_does_not_say_so_is_asked_again() -> None:
    rig = Rig()
    begin, answers = rig.store.begin, iter((False, True))

    def once_silent(name: str, *arguments: object, **options: object) -> object:
        begun = begin(name, *arguments, **options)  # type: ignore[arg-type]
        if not next(answers, True):
            rig.store.end(name)
            raise NoAnswer("no answer to this one")
        return begun

    rig.store.begin = once_silent  # type: ignore[method-assign,assignment]
    assert rig.run(RECALLS)[0].tokens == tokens_alone(RECALLS)
    rig.check_empty()
