"""Memory on a GPU: a limit holds while prompts of the greatest length run, and slots given up change no token."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from engine_rig import Record
from test_engine_gpu import NANO, answers, prompts, request, running

from gpu_worker.config import WorkerConfig
from gpu_worker.engine.engine import Engine
from gpu_worker.models.read_config import read_config
from gpu_worker.records import GenerationRequest
from gpu_worker.runner.runner import LocalRunner
from gpu_worker.startup.build import build_engine
from gpu_worker.startup.memory import context_bytes

pytest.importorskip("faiss")

from kv_store.config import idle_cores
from kv_store.local import LocalStore

LIMIT = 6 << 30

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_process_stays_under_its_limit() -> None:
    """In a process of its own: what other tests keep on the device would count against the limit."""
    child = multiprocessing.get_context("spawn").Process(target=answer_under_limit)
    child.start()
    child.join(300)
    child.kill()
    assert child.exitcode == 0


def answer_under_limit() -> None:
    device = torch.device("cuda", 0)
    with LocalStore(2 << 30, slab_bytes=256 << 10, num_trainers=idle_cores()) as store:
        config = WorkerConfig(
            model=str(NANO),
            listen="unix:/unused",
            store=store.target,
            device="cuda:0",
            max_num_seqs=4,
            gpu_memory_limit=LIMIT,
        )
        torch.zeros(1, device=device)
        context = context_bytes(device)
        worker = build_engine(config, lambda *progress: None)
        engine = worker.engine
        try:
            length = engine.info.max_model_len - 40
            pages = prompts([length] * 4)
            requests = [
                request(f"{policy} {number}", policy, page, num_tokens=30)
                for number, page in enumerate(pages)
                for policy in ("pqcache", "auto", "clusterkv")
            ]
            assert all(len(tokens) == 30 for tokens in answers(engine, requests).values())
            pages = worker.runner.pool.pages
            assert pages is not None
            used = context + pages.bytes.numel() + torch.cuda.max_memory_reserved(device)
            assert used <= LIMIT
            # Most of it is in use: nothing is left by mistake.
            assert used > LIMIT // 2
        finally:
            engine.close()


def run_pressed(
    engine: Engine, runner: LocalRunner, old: GenerationRequest, new: GenerationRequest
) -> tuple[Record, bool]:
    """The old one's events, while a newcomer comes after a few of its tokens; whether it gave up slots."""
    record = Record()
    engine.submit(old, record.events.append)
    while len(record.tokens) < 8:
        engine.step()
    sequence = runner.sequences[old.request_id]
    before = sequence.num_slots
    engine.submit(new, lambda event: None)
    gave_up = False
    while old.request_id in runner.sequences:
        engine.step()
        # It gets them back once the newcomer ends.
        gave_up = gave_up or sequence.num_slots < before
    while engine.has_work:
        engine.step()
    return record, gave_up


@pytest.mark.parametrize("policy", ["pqcache", "clusterkv"])
def test_slots_given_up_between_captured_steps_change_no_token(policy: str) -> None:
    old_page, new_page = prompts([6000, 6000])
    old, new = request("old", policy, old_page, num_tokens=60), request("new", "full", new_page)
    with running("cuda") as (engine, runner):
        row_bytes = runner.pool.row_format.row_bytes
        config = read_config(NANO)
        num_heads = config.num_layers * config.num_kv_heads
        expected, gave_up = run_pressed(engine, runner, old, new)
        assert not gave_up
    # Room for the old one's whole context and what it has beside its slots: the newcomer lacks some.
    with running("cuda", slot_bytes=11_000 * num_heads * row_bytes) as (engine, runner):
        record, gave_up = run_pressed(engine, runner, old, new)
        assert gave_up
        assert record.tokens == expected.tokens
        assert record.usage.bytes_moved > 0
        assert engine.stats().slot_used_tokens == 0
