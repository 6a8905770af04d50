"""The engine on a GPU: the CPU's tokens, no host within a step, nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from engine_rig import Record
from torch import Tensor

from gpu_worker.caches import HotCacheSize
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.request import Status
from gpu_worker.kernels.attention import Rest
from gpu_worker.models import load_model
from gpu_worker.policies.bitkeys.policy import BitIndex, BitKeys
from gpu_worker.policies.clusterkv.policy import ClusterKV
from gpu_worker.policies.pqcache.policy import PQCache
from gpu_worker.policies.recall import Candidates
from gpu_worker.policies.registry import registry
from gpu_worker.records import AttentionEvent, Budget, Event, GenerationRequest, IndexDevice, SamplingParams
from gpu_worker.runner.runner import LocalRunner
from gpu_worker.runner.steps import attention_views
from gpu_worker.runner.steps.decode import StepResult
from gpu_worker.startup.assemble import EngineOptions, assemble
from gpu_worker.state.block_tables import physical_slots
from kv_store.client import Layout, StoreClient

pytest.importorskip("faiss")

from gpu_worker.row_format import row_format
from kv_store.local import LocalStore

ROOT = Path(__file__).resolve().parents[3]
NANO = ROOT / "models" / "carrel-nano"
BOOK = ROOT / "examples" / "documents" / "voyage-of-the-beagle.txt"
POLICIES = ("full", "oracle", "pqcache", "clusterkv")
LEAST, WHOLE = HotCacheSize(tokens=2), HotCacheSize()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def running(
    device: str,
    hot_cache: HotCacheSize = WHOLE,
    transport: str = "zero_copy",
    index_device: IndexDevice = IndexDevice.AUTO,
    max_num_seqs: int = 8,
    slot_bytes: int = 512 << 20,
    window_size: int = 24,
    captures_graphs: bool = True,
    reuses_prefixes: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[Engine, LocalRunner]]:
    """carrel-nano over a store of its own."""
    model = load_model(str(NANO), device=torch.device(device), dtype=dtype)
    config = model.config
    layout = Layout(config.num_layers, config.num_kv_heads, row_format(config.head_dim, dtype))
    options = EngineOptions(
        max_model_len=8192,
        slot_bytes=slot_bytes,
        max_num_seqs=max_num_seqs,
        prefill_chunk=1024,
        hot_cache=hot_cache,
        policies=registry(
            PQCache(max_iterations=4),
            ClusterKV(window_size=window_size, max_iterations=4),
            BitKeys(rest="fitted"),
        ),
        index_device=index_device,
        captures_graphs=captures_graphs,
        reuses_prefixes=reuses_prefixes,
    )
    with LocalStore(2 << 30, slab_bytes=256 << 10, num_trainers=2) as store:
        client = StoreClient.connect(store.target, layout, worker_id="test", transport=transport)
        worker = assemble(model, client, options)
        try:
            yield worker.engine, worker.runner
        finally:
            worker.engine.close()


def prompts(lengths: list[int]) -> list[tuple[int, ...]]:
    """Different pages of a book, as long as asked for; they may overlap, and a short book is read again."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(NANO / "tokenizer.json"))
    ids = tokenizer.encode(BOOK.read_text()).ids
    ids *= 2 + max(lengths) // len(ids)
    stride = (len(ids) - max(lengths)) // len(lengths)
    pages = [tuple(ids[stride * n : stride * n + length]) for n, length in enumerate(lengths)]
    assert [len(page) for page in pages] == lengths
    return pages


def request(name: str, policy: str, prompt: tuple[int, ...], num_tokens: int = 40) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=1)
    return GenerationRequest(name, prompt, sampling, policy, Budget(share=0.1))


def step_until(engine: Engine, is_reached: Callable[[], bool], most: int = 5000) -> None:
    for _ in range(most):
        if is_reached():
            return
        engine.step()
    raise AssertionError(f"not reached within {most} steps")


def answers(engine: Engine, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    records = {one.request_id: Record() for one in requests}
    for one in requests:
        engine.submit(one, records[one.request_id].events.append)
    # A step that waits for an index takes 5 ms.
    step_until(engine, lambda: not engine.has_work, most=50_000)
    return {name: record.tokens for name, record in records.items()}


def every_policy(num_tokens: int = 40) -> list[GenerationRequest]:
    """Two of each, of unequal length."""
    lengths = [1500, 900, 2100, 777, 1300, 1024, 640, 1999]
    pages = prompts(lengths)
    return [
        request(f"{POLICIES[n % 4]} {n}", POLICIES[n % 4], page, num_tokens) for n, page in enumerate(pages)
    ]


@pytest.fixture(scope="module")
def cpu_tokens() -> dict[str, list[int]]:
    with running("cpu") as (engine, _):
        return answers(engine, every_policy())


@pytest.mark.parametrize("hot_cache", [WHOLE, HotCacheSize(share=0.1), LEAST])
@pytest.mark.parametrize(
    ("transport", "index_device", "other"),
    [
        # The device clusters by itself, and so otherwise.
        ("zero_copy", IndexDevice.AUTO, "clusterkv"),
        ("zero_copy", IndexDevice.CPU, ""),
        ("shm", IndexDevice.CPU, ""),
        # The oracle's index is on the device only.
        ("grpc", IndexDevice.CPU, "oracle"),
    ],
)
def test_the_gpu_gives_the_cpus_tokens(
    hot_cache: HotCacheSize,
    transport: str,
    index_device: IndexDevice,
    other: str,
    cpu_tokens: dict[str, list[int]],
) -> None:
    asked = [one for one in every_policy() if one.policy != other]
    with running("cuda", hot_cache, transport, index_device) as (engine, _):
        assert answers(engine, asked) == {one.request_id: cpu_tokens[one.request_id] for one in asked}
        if hot_cache == LEAST:
            stats = engine.stats()
            assert 0 < stats.hit_rows_total < stats.selected_rows_total


def test_nothing_is_captured_where_steps_are_to_be_eager(
    cpu_tokens: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock(side_effect=AssertionError("captured")))
    with running("cuda", index_device=IndexDevice.CPU, captures_graphs=False) as (engine, _):
        assert answers(engine, every_policy()) == cpu_tokens


@pytest.mark.parametrize("captures_graphs", [False, True])
@pytest.mark.parametrize("hot_cache", [WHOLE, LEAST])
def test_attention_waits_for_what_stands_in_beside_it(
    hot_cache: HotCacheSize, captures_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late that is, and whatever the current stream does with its memory meanwhile."""
    stand_in, seen = BitKeys.stand_in, []

    def stand_in_late(
        policy: BitKeys, index: BitIndex, candidates: Candidates, selected: Tensor, rest: Rest
    ) -> None:
        torch.cuda._sleep(2_000_000)
        stand_in(policy, index, candidates, selected, rest)

    def watch(result: StepResult) -> None:
        seen[-1].append(result.logits.cpu())

    asked = [request(f"{n}", "bitkeys", page, 12) for n, page in enumerate(prompts([1500, 900]))]
    for late in (False, True):
        seen.append([])
        if late:
            monkeypatch.setattr(BitKeys, "stand_in", stand_in_late)
        with running("cuda", hot_cache, captures_graphs=captures_graphs) as (engine, runner):
            runner.decode.watch = watch
            for one in asked:
                answers(engine, [one])
            assert bool(runner.decode.graphs.captured) == captures_graphs
    at_once, waited = seen
    assert len(at_once) == len(waited) > 0
    assert all(torch.equal(one, other) for one, other in zip(at_once, waited, strict=True))


@pytest.mark.parametrize("hot_cache", [WHOLE, HotCacheSize(share=0.1)])
def test_captured_steps_tell_what_they_attended(
    hot_cache: HotCacheSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_views, "INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(attention_views, "REST", 0)
    asked = replace(request("one", "pqcache", prompts([1500])[0]), attention=True)
    seen = []
    for captures_graphs in (False, True):
        record = Record()
        with running("cuda", hot_cache, captures_graphs=captures_graphs) as (engine, _):
            engine.submit(asked, record.events.append)
            step_until(engine, lambda: not engine.has_work, most=50_000)
        events = [event for event in record.events if isinstance(event, AttentionEvent)]
        seen.append({event.step: (event.layers, event.attended) for event in events})
    eager, captured = seen
    told = eager.keys() & captured.keys()
    assert len(told) > 20
    assert all(captured[step] == eager[step] for step in told)


def test_every_method_gives_the_cpus_tokens() -> None:
    """All of them in one batch, each on a page of its own; but InfiniGen, whose columns are chosen by an
    eigendecomposition that no two libraries round alike. A near tie may fall the other way on some page: a method that
    differs must agree on two other pages."""
    names = sorted(registry().keys() - {"infinigen"})
    pages = prompts([700 + 11 * n for n in range(len(names) + 2)])
    differing = differ(dict(zip(names, pages, strict=False)))
    for other in pages[-2:]:
        assert differ(dict.fromkeys(differing, other)) == set()


def differ(page_of: dict[str, tuple[int, ...]]) -> set[str]:
    """The policies whose tokens on a GPU are not the CPU's, each on its page."""
    asked = [request(name, name, page, 24) for name, page in page_of.items()]
    if not asked:
        return set()
    with running("cpu", max_num_seqs=len(asked), slot_bytes=1 << 30) as (engine, _):
        expected = answers(engine, asked)
    store = IndexDevice.CPU
    with running("cuda", index_device=store, max_num_seqs=len(asked), slot_bytes=1 << 30) as (engine, _):
        found = answers(engine, asked)
    return {name for name in page_of if found[name] != expected[name]}


@pytest.mark.parametrize("hot_cache", [WHOLE, LEAST])
def test_indexes_trained_on_the_device_answer_alone_as_in_a_batch(hot_cache: HotCacheSize) -> None:
    alone = {}
    with running("cuda", hot_cache, index_device=IndexDevice.GPU) as (engine, _):
        for one in every_policy():
            alone.update(answers(engine, [one]))
    with running("cuda", hot_cache, index_device=IndexDevice.GPU) as (engine, _):
        assert answers(engine, every_policy()) == alone


def test_short_prompts_answer_together_as_each_alone() -> None:
    pages = prompts([300, 40, 7, 333, 200, 1])
    asked = [request(f"{n}", POLICIES[n % 4], page) for n, page in enumerate(pages)]
    alone = {}
    with running("cuda") as (engine, _):
        for one in asked:
            alone.update(answers(engine, [one]))
        assert answers(engine, asked) == alone


@pytest.mark.parametrize("hot_cache", [WHOLE, LEAST])
def test_no_decode_step_waits_for_the_device(hot_cache: HotCacheSize) -> None:
    """PyTorch raises where a call would synchronise, while steps run that were captured before.

    A window that is clustered does wait, once in so many steps as it has tokens: none is here.
    """
    with running("cuda", hot_cache, window_size=1536) as (engine, runner):
        # Tokens enough that the first still decode once the last one does.
        for one in every_policy(num_tokens=1500):
            engine.submit(one, lambda event: None)
        scheduler = engine.scheduler
        step_until(engine, lambda: len(scheduler.with_status(Status.DECODE)) == 8, most=1400)
        for _ in range(3):
            engine.step()
        sequences = [runner.sequences[one.request_id] for one in scheduler.with_status(Status.DECODE)]
        with torch.inference_mode():
            for _ in range(3):
                torch.cuda.set_sync_debug_mode("error")
                try:
                    result = runner.decode.run(sequences)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                assert len(result.sequences) == 8
                torch.cuda.synchronize()
        assert runner.decode.graphs.captured


@pytest.mark.parametrize("hot_cache", [WHOLE, LEAST])
@pytest.mark.parametrize("policy", ["pqcache", "snapkv"])
def test_no_look_waits_for_the_device(
    policy: str, hot_cache: HotCacheSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_views, "INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(attention_views, "REST", 0)
    record = Record()
    asked = replace(request("one", policy, prompts([1500])[0], num_tokens=300), attention=True)
    with running("cuda", hot_cache) as (engine, runner):
        engine.submit(asked, record.events.append)
        step_until(engine, lambda: len(record.tokens) > 9)
        sequences = [runner.sequences[one.request_id] for one in engine.scheduler.with_status(Status.DECODE)]
        events: list[tuple[str, Event]] = []
        with torch.inference_mode():
            for _ in range(3):
                torch.cuda.set_sync_debug_mode("error")
                try:
                    events += runner.decode.run(sequences).events
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
        assert any(isinstance(event, AttentionEvent) for _, event in events)


def test_compressing_again_does_not_wait_for_the_device() -> None:
    with running("cuda") as (engine, runner):
        engine.submit(request("one", "chelsea", prompts([1500])[0], num_tokens=600), lambda event: None)
        step_until(engine, lambda: bool(engine.scheduler.with_status(Status.DECODE)))
        sequence = runner.sequences[engine.scheduler.with_status(Status.DECODE)[0].request_id]
        # Once for what is compiled then.
        for is_first in (True, False):
            step_until(engine, lambda: sequence.num_tokens - sequence.kept.at == 128)
            torch.cuda.synchronize()
            with torch.inference_mode():
                torch.cuda.set_sync_debug_mode("default" if is_first else "error")
                try:
                    runner.decode.advance(sequence)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            assert sequence.kept.at == sequence.num_tokens


def test_two_hundred_random_admissions_aborts_and_ends_leak_nothing() -> None:
    source = random.Random(0)
    pages = prompts([40, 150, 290, 400])
    # Few at once: every mix of policies is a step of its own, to be captured.
    with running("cuda", HotCacheSize(share=0.2), max_num_seqs=3) as (engine, runner):
        records: dict[str, Record] = {}
        for number in range(200):
            name = f"request {number}"
            records[name] = Record()
            one = request(name, source.choice(POLICIES), source.choice(pages), source.randrange(1, 14))
            engine.submit(one, records[name].events.append)
            for _ in range(source.randrange(4)):
                engine.step()
            if source.random() < 0.3:
                engine.abort(f"request {source.randrange(number + 1)}")
        step_until(engine, lambda: not engine.has_work)
        assert all(record.is_over for record in records.values())
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.slot_used_tokens, stats.requests_failed_total) == (
            0,
            0,
            0,
            0,
        )
        assert runner.pool.num_free_blocks == runner.pool.num_blocks
        assert not runner.offloader.extents
        assert bool((runner.offloader.arena.view.slab_tables == -1).all())


@pytest.mark.parametrize("policy", ["full", "snapkv", "pqcache"])
@pytest.mark.parametrize("index_device", IndexDevice)
def test_what_is_known_of_a_prompt_is_read_while_it_is_computed(
    policy: str, index_device: IndexDevice
) -> None:
    page, *ends = prompts([3000, 100, 300, 600])
    first, *others = (request(f"{n}", policy, page + end) for n, end in enumerate(ends))
    with running("cuda", index_device=index_device) as (engine, _):
        expected = answers(engine, [first, *others])
    with running("cuda", index_device=index_device, reuses_prefixes=True) as (engine, _):
        assert answers(engine, [first])["0"] == expected["0"]
        records = {one.request_id: Record() for one in others}
        for one in others:
            engine.submit(one, records[one.request_id].events.append)
        step_until(engine, lambda: not engine.has_work, most=50_000)
        # Slabs of 256 tokens.
        assert [record.usage.cached_tokens for record in records.values()] == [2816, 2816]
        assert {name: record.tokens for name, record in records.items()} == {
            name: expected[name] for name in records
        }


def test_a_captured_prompt_answers_alike_whatever_ran_before_and_is_the_same_in_slots_and_arena() -> None:
    pages = dict(zip(("pqcache", "full", "clusterkv"), prompts([500, 300, 40]), strict=True))

    def short(name: str, policy: str) -> GenerationRequest:
        return replace(request(name, policy, pages[policy], 12), budget=Budget(tokens=4096))

    with running("cuda", dtype=torch.bfloat16) as (engine, runner):
        found = []
        # Run as it is, captured, replayed.
        for _ in range(4):
            found.append([answers(engine, [short(policy, policy)])[policy] for policy in pages])
            # Who comes next gets other slots.
            engine.submit(short("stays", "full"), lambda event: None)
            engine.submit(short("goes", "pqcache"), lambda event: None)
            engine.step()
            engine.abort("goes")
            step_until(engine, lambda: not engine.has_work)
        assert all(tokens == found[0] for tokens in found)

        engine.submit(short("kept", "pqcache"), lambda event: None)
        step_until(engine, lambda: engine.scheduler.find("kept").status is Status.DECODE)
        kept = runner.sequences["kept"]
        num_tokens, tables = kept.num_prefill, runner.caches.block_tables.tables[kept.seat]
        positions = torch.arange(num_tokens, device="cuda")
        for layer, table in enumerate(tables):
            slots = physical_slots(table, positions.expand(len(table), -1))
            in_arena = runner.offloader.host.inspect(kept, layer, len(table))[:, :num_tokens]
            assert torch.equal(in_arena, runner.pool.rows[slots])
