"""A session that follows its user: what one store has of a prompt, another one's engine reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from engine_rig import LAYOUT, Rig, every_small_policy, make_model, random_prompt, request
from offload_rig import make_sequence

from gpu_worker.records import GenerationRequest
from gpu_worker.store.prefixes import PrefixChain, model_root
from kv_store.client import StoreClient
from kv_store.local import LocalStore

PER_SLAB = 64
SLAB_BYTES = PER_SLAB * LAYOUT.token_bytes
DOCUMENT = random_prompt(300)
MINE = b"me"


def asked(name: str, policy: str, seed: int) -> GenerationRequest:
    prompt = DOCUMENT + random_prompt(40, seed=seed)
    return replace(request(name, policy, 0.25, prompt=prompt, max_tokens=20), prefix_salt=MINE)


@contextmanager
def hosts(number: int) -> Iterator[list[tuple[LocalStore, StoreClient, Rig]]]:
    """Hosts of the same model, each with a store and an engine that shares prefixes."""
    with ExitStack() as stack:
        made = []
        for host in range(number):
            store = stack.enter_context(LocalStore(512 * SLAB_BYTES, slab_bytes=SLAB_BYTES))
            client = StoreClient.connect(store.target, LAYOUT, worker_id=f"host {host}", timeout_seconds=5.0)
            rig = Rig(policies=every_small_policy(), reuses_prefixes=True, client=client)
            stack.callback(rig.engine.close)
            made.append((store, client, rig))
        yield made


def hashes_of(one: GenerationRequest, salt: bytes = MINE) -> tuple[bytes, ...]:
    sequence = make_sequence("a", 0, len(DOCUMENT[:250]))
    sequence.request = replace(one, prefix_salt=salt)
    sequence.num_prefill = len(one.prompt_token_ids)
    return PrefixChain(model_root(make_model()), PER_SLAB).hashes(sequence)


@pytest.mark.parametrize("policy", ["pqcache", "clusterkv"])
def test_an_answer_from_a_moved_prefix_is_that_of_a_cold_engine(policy: str) -> None:
    with hosts(3) as [(there, _, earlier), (_, here, later), (_, _, cold)]:
        first, second = asked("first", policy, 1), asked("second", policy, 2)
        expected = cold.tokens(second)
        earlier.run(first)
        pulled = here.pull_prefix(there.target, hashes_of(second))
        assert pulled.moved_tokens == 4 * PER_SLAB
        warm = later.run(second)[0]
        assert warm.usage.cached_tokens == 4 * PER_SLAB
        assert warm.tokens == expected
        # What it read is its own from now on.
        there.restart()
        again = later.run(replace(second, request_id="again"))[0]
        assert (again.usage.cached_tokens, again.tokens) == (5 * PER_SLAB, expected)


def test_another_callers_prefix_is_not_found() -> None:
    with hosts(2) as [(there, _, earlier), (_, here, later)]:
        one = asked("one", "pqcache", 1)
        earlier.run(one)
        assert here.pull_prefix(there.target, hashes_of(one, b"them")).num_tokens == 0
        assert here.pull_prefix(there.target, hashes_of(one)).num_tokens == 5 * PER_SLAB
        assert later.run(replace(one, prefix_salt=b"them"))[0].usage.cached_tokens == 0
        assert later.run(replace(one, request_id="two"))[0].usage.cached_tokens == 5 * PER_SLAB
