"""The engine's work before its first request, which leaves nothing behind."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_rig import LAYOUT, Rig, pool_of, random_prompt, request
from torch.utils._python_dispatch import TorchDispatchMode
from waiting import PATIENCE

from gpu_worker.records import Budget, GenerationRequest
from gpu_worker.runner.prompts.captured import BUCKETS
from gpu_worker.runner.steps.graphs import MAX_PREPARED
from gpu_worker.startup.warm import warm_steps, warmup
from gpu_worker.startup.warm.warm_requests import Requests
from gpu_worker.startup.warm.warm_steps import Kind, batches
from gpu_worker.startup.warm.warmup import WarmUp, requests, stages
from gpu_worker.state.batch import Buckets
from gpu_worker.state.sequence import Sequence
from kv_store.client import StoreClient, StoreUnreachable
from kv_store.local import LocalStore

SLAB_BYTES = 64 * LAYOUT.token_bytes
ON_GPU = Buckets(is_exact=False)


class Warm:
    """A warm-up of a rig's engine, as on a GPU: what was submitted, the batches that decoded, and its progress."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.engine, self.runner = rig.engine, rig.runner
        self.submitted: list[GenerationRequest] = []
        self.batches: set[tuple[str, int]] = set()
        self.prepared: set[tuple[tuple[str, bool], ...]] = set()
        self.compiled: list[tuple[str, int]] = []
        self.has_missed = False
        self.progress: list[tuple[int, int]] = []
        # Policies that were asked, and steps that were captured.
        self.order: list[str] = []
        self.engine.info = replace(self.engine.info, device="cuda:0")
        submit, decode, prepare = self.engine.submit, self.runner.decode.run, self.runner.decode.prepare

        def noted(one: GenerationRequest, sink: object) -> None:
            self.submitted.append(one)
            self.order.append(one.policy)
            submit(one, sink)  # type: ignore[arg-type]

        def decoded(sequences: list[Sequence], *drawn: torch.Tensor | None) -> object:
            self.batches.add((sequences[0].policy.name, len(sequences)))
            self.has_missed |= any(one.can_miss for one in sequences)
            return decode(sequences, *drawn)

        def prepared(sequences: list[Sequence], captures: bool = True) -> None:
            if captures:
                self.order.append("captured")
                self.prepared.add(tuple(sorted({(one.policy.name, one.can_miss) for one in sequences})))
            else:
                self.compiled += [(one.policy.name, one.num_tokens + 1) for one in sequences]
            prepare(sequences, captures)

        monkeypatch.setattr(self.engine, "submit", noted)
        monkeypatch.setattr(self.runner.decode, "run", decoded)
        monkeypatch.setattr(self.runner.decode, "prepare", prepared)
        worker = rig.worker
        self.warm_up = WarmUp(worker, 64, lambda *done: self.progress.append(done), **options)


class Operations(TorchDispatchMode):
    """Notes which operations run, on tensors of which types and dimensions: stand for kernels and plans."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[object, ...]] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tensors = (each for each in args if isinstance(each, torch.Tensor))
        self.seen.add((str(operation), *((each.dtype, each.dim()) for each in tensors)))
        return operation(*args, **(kwargs or {}))


def check_unused(rig: Rig) -> None:
    """The engine, its pool and its store are as at the start."""
    capacity = rig.engine.info.slot_capacity_tokens
    assert rig.engine.stats() == replace(Rig().engine.stats(), slot_capacity_tokens=capacity)
    assert rig.runner.pool.num_used_slots == 0
    assert not rig.store.prefixes
    assert not rig.store.sessions
    assert not rig.runner.offloader.extents
    assert len(rig.runner.prefills) == len(rig.runner.indexing) == 0
    rig.check_empty()


def test_every_kind_of_step_is_prepared_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(max_num_seqs=4, reuses_prefixes=True, slot_bytes=pool_of(60), max_model_len=480)
    warm = Warm(rig, monkeypatch)
    warm.warm_up.run()
    assert {(policy, size) for policy in ("bitkeys", "full") for size in (1, 2, 3, 4)} <= warm.batches
    assert {one.policy for one in warm.submitted} == {"bitkeys", "full"}
    dense, resident, missing = ("full", False), ("bitkeys", False), ("bitkeys", True)
    assert {(dense,), (resident,), (missing,), (missing, dense), (resident, missing, dense)} <= warm.prepared
    # What masks of grammars need is compiled, too.
    assert all(one.constraint is not None for one in warm.submitted)
    # With room for all, requests gave slots up.
    assert warm.has_missed
    num_stages = warm.progress[-1][1]
    assert warm.progress == [(done, num_stages) for done in range(num_stages + 1)]
    check_unused(rig)
    # A prompt of the warm-up finds nothing in the store.
    prompt = warm.submitted[-1].prompt_token_ids
    usage = rig.run(request("one", "bitkeys", 0.1, prompt=prompt, max_tokens=3))[0].usage
    assert usage.cached_tokens == 0


def test_first_second_turns_need_nothing_new_and_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm a policy that only copies its prompts to the store, one that recalls, and one that retains."""
    monkeypatch.setattr(warmup, "CHAT", 30)
    policies, first, later = ("full", "bitkeys", "snapkv"), random_prompt(200), random_prompt(50, 1)
    with LocalStore(64 * SLAB_BYTES, slab_bytes=SLAB_BYTES) as store:
        client = StoreClient.connect(store.target, LAYOUT, worker_id="w", timeout_seconds=PATIENCE)
        rig = Rig(max_num_seqs=2, reuses_prefixes=True, client=client, max_model_len=480)
        empty, operations = client.stats().reserved_bytes, Operations()
        with operations:
            Warm(rig, monkeypatch, policies=("snapkv",)).warm_up.run()
        stats = client.stats()
        assert (stats.reserved_bytes, stats.num_sequences, stats.num_sessions) == (empty, 0, 0)
        capacity = rig.engine.info.slot_capacity_tokens
        assert rig.engine.stats() == replace(Rig().engine.stats(), slot_capacity_tokens=capacity)
        warm = set(operations.seen)
        with operations:
            for policy in policies:
                one = replace(request(policy, policy, 0.1, prompt=first), cache_salt=policy)
                rig.run(one)
                two = replace(one, request_id="second", prompt_token_ids=first + later)
                assert rig.run(two)[0].usage.cached_tokens == 192
        assert operations.seen == warm
        rig.engine.close()


def test_steps_of_shorter_sequences_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_steps, "ONE_LENGTH", 64)
    rig = Rig(max_num_seqs=2, slot_bytes=pool_of(60), max_model_len=480)
    warm = Warm(rig, monkeypatch)
    warm.warm_up.run()
    assert warm.compiled == [("bitkeys", 64), ("bitkeys", 128), ("bitkeys", 256)]
    check_unused(rig)


def test_a_retain_policy_is_warm_beside_full_and_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(max_num_seqs=2, slot_bytes=pool_of(60), max_model_len=480)
    rig.engine.info = replace(rig.engine.info, default_policy="snapkv")
    warm = Warm(rig, monkeypatch)
    warm.warm_up.run()
    assert {("snapkv", 2), ("full", 2)} <= warm.batches
    assert {(("full", False),), (("bitkeys", False),), (("bitkeys", True),)} <= warm.prepared
    check_unused(rig)


def test_policies_that_are_named_are_warm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_steps, "ONE_LENGTH", 64)
    rig = Rig(max_num_seqs=2, slot_bytes=pool_of(60), max_model_len=480)
    warm = Warm(rig, monkeypatch, policies=("full", "snapkv", "auto", "quest", "snapkv"))
    warm.warm_up.run()
    assert {
        (policy, size) for policy in ("bitkeys", "full", "snapkv", "quest") for size in (1, 2)
    } <= warm.batches
    # Steps that select are compiled; those that are captured for good are of the server's own.
    assert {one for one in warm.compiled if one[0] == "quest"} == {
        ("quest", length) for length in (64, 128, 256, 480)
    }
    assert {one[0] for some in warm.prepared for one in some} == {"full", "bitkeys"}
    # What buffers they need is there before steps are captured over them.
    first_captured = warm.order.index("captured")
    assert warm.order.index("snapkv") < warm.order.index("quest") < first_captured
    assert {"snapkv", "quest"}.isdisjoint(warm.order[first_captured:])
    check_unused(rig)


def test_a_policy_that_fails_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(max_num_seqs=2, slot_bytes=pool_of(60), max_model_len=480)
    warm = Warm(rig, monkeypatch, policies=("quest", "sparq", "snapkv"))
    run = rig.runner.decode.run

    def broken(sequences: list[Sequence], *drawn: torch.Tensor | None) -> object:
        if sequences[0].policy.name == "quest":
            broken_step()
        if sequences[0].policy.name == "sparq":
            raise torch.OutOfMemoryError("no memory for a step")
        return run(sequences, *drawn)

    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        patch.setattr(rig.runner.decode, "run", broken)
        warm.warm_up.run()
    assert {("snapkv", 2), ("bitkeys", 2), ("full", 2)} <= warm.batches
    assert (("bitkeys", False),) in warm.prepared
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["the warm-up of quest failed, its first requests may take longer"]
    assert "no room to warm up Requests(policy='sparq'" in caplog.text
    check_unused(rig)
    assert len(rig.tokens(request("one", "quest", 0.3, max_tokens=5))) == 5


@pytest.mark.parametrize("most", [1, 3, 20, 32, 256])
def test_every_mix_of_two_kinds_fits_a_prepared_step(most: int) -> None:
    kinds = Kind("full"), Kind("bitkeys"), Kind("bitkeys", can_miss=True)
    sizes = sorted({min(ON_GPU.lanes(size), most) for size in range(1, most + 1)})
    found = batches(kinds, sizes, sizes[-1])
    assert len(found) <= MAX_PREPARED
    for one in kinds:
        assert ((one, most),) in found
        # Small batches are padded little.
        assert {((one, size),) for size in sizes[:5]} <= set(found)
    for lanes in (2, 1), (8, 4), (most, most):
        for missing in kinds[1:]:
            assert ((kinds[0], min(lanes[0], most)), (missing, min(lanes[1], most))) in found


def test_a_gpu_prepares_for_prompts_of_all_lengths_and_for_padded_batches() -> None:
    info = replace(Rig().engine.info, device="cuda:0", max_num_seqs=20, max_model_len=1 << 17)
    found = requests(info, 2048, ON_GPU, info.max_num_seqs)
    assert {each.sizes for each in found} == {(1,), (1, 2, 4, 8, 16, 20)}
    assert [each.policy for each in found if len(each.sizes) > 1] == ["bitkeys", "full"]
    # First tokens only; each pass runs as it is, then is captured.
    short = [each.num_prompt for each in found if not each.num_steps]
    assert short[:4] == [1024, 1024, 896, 896]
    assert set(short) == set(BUCKETS)
    alone = [each.num_prompt for each in found if each.sizes == (1,) and 1 < each.max_tokens < 10]
    assert alone == [16, 1024, 1748, 2348, 3796, 7892, 16084]
    # Shorter prompts are attended whole, or nearly so.
    wide = requests(replace(info, default_budget=Budget(tokens=2048)), 2048, ON_GPU, info.max_num_seqs)
    assert Requests("bitkeys", 7892, info.max_model_len - 7892, gives_up=True) in wide
    assert Requests("bitkeys", 300, info.max_model_len - 300, gives_up=True) in found
    # Requests that decode together select, as long as their prompts are short.
    least = requests(
        replace(info, default_budget=Budget(share=0.1, least=512)), 2048, ON_GPU, info.max_num_seqs
    )
    together = [[each.num_prompt for each in some if len(each.sizes) > 1] for some in (found, least, wide)]
    assert together == [[300, 300], [1024, 300], [300, 300]]


@pytest.mark.parametrize("max_model_len", [2, 19, 20, 320, 5000])
def test_no_request_is_longer_than_the_model_takes(max_model_len: int) -> None:
    info = replace(Rig().engine.info, device="cuda:0", max_model_len=max_model_len)
    found = requests(info, 2048, ON_GPU, info.max_num_seqs)
    assert all(each.num_prompt + each.max_tokens <= max_model_len for each in found)
    assert bool(found) is (max_model_len >= 20)
    assert max((each.num_prompt for each in found), default=0) in (0, 16, 300, 4996)


def test_a_cpu_gets_one_short_request() -> None:
    rig = Rig()
    worker = rig.worker
    assert stages(worker, 64) == [Requests("bitkeys", 16)]
    assert stages(worker, 64, ("quest",)) == stages(worker, 64)
    WarmUp(worker, 64, lambda *done: None).run()
    check_unused(rig)


def broken_step(*args: object) -> None:
    raise ZeroDivisionError("a kernel does not compile")


def test_a_failure_is_logged_and_leaves_an_engine_that_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    warm = Warm(rig, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(rig.runner.decode, "run", broken_step)
        warm.warm_up.run()
    assert "a kernel does not compile" in caplog.text
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    check_unused(rig)
    assert len(rig.tokens(request("one", "bitkeys", 0.3, max_tokens=5))) == 5


def test_a_lost_store_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.store.failure = StoreUnreachable("the store is gone")
    Warm(rig, monkeypatch).warm_up.run()
    # The engine's link tells why, the warm-up what follows.
    assert [record.name for record in caplog.records] == [
        "gpu_worker.store.link",
        "gpu_worker.startup.warm.warmup",
    ]
    assert "the store is gone" in caplog.text


def test_what_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(slot_bytes=pool_of(2), max_num_seqs=3, max_model_len=480)
    warm = Warm(rig, monkeypatch)
    warm.warm_up.run()
    assert not caplog.records
    assert len(warm.progress) > 3
    check_unused(rig)


@pytest.mark.parametrize("is_late", [True, False])
def test_it_ends_when_time_is_up_or_the_worker_is_to_stop(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    warm = Warm(rig, monkeypatch, limit_seconds=0.0 if is_late else 120.0)
    warm.warm_up.run(lambda: not is_late)
    assert warm.batches == set()
    check_unused(rig)


def test_it_waits_for_the_arena_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    looks = iter([False, False, True])
    monkeypatch.setattr(type(rig.runner.offloader.arena), "is_settled", property(lambda self: next(looks)))
    Warm(rig, monkeypatch).warm_up.run()
    assert next(looks, None) is None
    monkeypatch.setattr(type(rig.runner.offloader.arena), "is_settled", False)
    Warm(rig, monkeypatch, limit_seconds=0.0).warm_up.run()
