"""Plans for GPUs: the figures are the memory plan's own, and a worker starts where they say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_model import write_gguf
from tiny_models import CONFIGS, make_model

from carrel.process.sizing import Card, Held, Sizing
from carrel.process.version import CHECKOUT
from gpu_worker.caches.layer_map import LayerMap
from gpu_worker.config import WorkerConfig
from gpu_worker.errors import ConfigError, ModelError
from gpu_worker.models.read_config import read_config
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.registry import registry
from gpu_worker.records import Budget, IndexDevice
from gpu_worker.runner.workload import Workload
from gpu_worker.startup.memory import CONTEXT_BYTES, MemoryPlan, fits, least_slot_bytes
from gpu_worker.startup.sizing import main, size_cards
from kv_store.client import RowFormat

GIB = 1 << 30
CONFIG = CHECKOUT / "benchmarks/configs/llama-3.1-8b.json"
WEIGHTS = 2 * 8_030_261_248
TOKEN_BYTES = 32 * 8 * 512


def sized(*cards: int, model: Path = CONFIG, host: int | None = None, **options: object) -> Sizing:
    config = WorkerConfig(model=str(model), listen="unix:-", store="unix:-")
    return size_cards(replace(config, **options), cards, host)


def llama(seats: int, length: int) -> Workload:
    """The same model and options, put together by hand."""
    shape = CacheShape(seats, 32, 8, 4, RowFormat(128), length, 128**-0.5, torch.device("meta"))
    return Workload(
        read_config(CONFIG),
        shape,
        torch.bfloat16,
        registry(),
        "bitkeys",
        Budget(share=0.1, least=512),
        2048,
        LayerMap.with_full(32),
        IndexDevice.AUTO,
    )


def available(card: Card) -> int:
    return card.num_bytes - CONTEXT_BYTES - WEIGHTS


@pytest.mark.parametrize(
    ("gib", "golden"),
    [
        (24, [8, (8192, 3, 8), (32768, 0, 3), (131072, 0, 1)]),
        (80, [256, (8192, 54, 224), (32768, 14, 70), (131072, 3, 19)]),
    ],
)
def test_the_figures_are_those_of_the_memory_plan(gib: int, golden: list[object]) -> None:
    sizing = sized(gib * GIB)
    assert (sizing.weight_bytes, sizing.token_bytes, sizing.dtype) == (WEIGHTS, TOKEN_BYTES, "bfloat16")
    (card,) = sizing.cards
    assert [card.seats, *((each.num_tokens, each.dense, each.selecting) for each in card.held)] == golden
    workload = llama(card.seats, card.longest)
    pool = MemoryPlan.of(workload, available(card)).slots
    assert card.kv_tokens == pool // TOKEN_BYTES
    for each in card.held:
        selecting = workload.of_length(each.num_tokens)
        dense = replace(selecting, default_policy="full")
        counted = [min(card.seats, pool // least_slot_bytes(one)) for one in (dense, selecting)]
        assert [each.dense, each.selecting] == counted


def test_where_the_model_does_not_fit_what_is_missing_is_just_enough() -> None:
    (short,) = sized(16 * GIB).cards
    assert short == Card(16 * GIB, longest=0, missing_bytes=short.missing_bytes)
    enough = short.num_bytes + short.missing_bytes
    starts, misses = sized(enough, enough - 1).cards
    assert (starts.longest, starts.missing_bytes, misses.missing_bytes) == (1024, 0, 1)


def test_the_longest_context_starts_and_a_longer_one_does_not() -> None:
    (card,) = sized(20 * GIB).cards
    assert 32768 < card.longest < 131072
    assert fits(llama(card.seats, card.longest), available(card))
    assert not fits(llama(1, card.longest + 1024), available(card))
    (as_option,) = sized(20 * GIB, max_model_len=card.longest).cards
    assert (as_option.seats, as_option.kv_tokens) == (card.seats, card.kv_tokens)


def test_a_length_that_the_worker_refuses_is_counted_as_none() -> None:
    """The slots would do: what a head keeps does not grow with the prompt."""
    (card,) = sized(20 * GIB, policy="snapkv", budget=Budget(tokens=1024)).cards
    assert card.longest < 131072
    assert card.held[0].selecting
    assert card.held[-1] == Held(131072, 0, 0)


def test_host_memory_limits_requests_that_recall_and_no_others() -> None:
    with_host = [each.selecting for each in sized(80 * GIB, host=64 * GIB).cards[0].held]
    assert with_host == [64, 16, 4]
    retained = [sized(80 * GIB, host=host, policy="snapkv").cards for host in (GIB, None)]
    assert retained[0] == retained[1]
    assert all(each.selecting and each.selecting > each.dense for each in retained[0][0].held)


def test_options_of_the_worker_count() -> None:
    full = sized(80 * GIB, policy="full", max_num_seqs=10, max_model_len=32768)
    (card,) = full.cards
    assert not full.recalls
    assert card.seats == 10
    assert [(each.num_tokens, each.selecting) for each in card.held] == [(8192, None), (32768, None)]
    assert max(each.dense for each in card.held) == 10
    assert sized(80 * GIB, dtype="float32").weight_bytes == 2 * WEIGHTS


def test_a_gguf_file_is_planned_by_its_head(tmp_path: Path) -> None:
    model = make_model(CONFIGS["qwen3"]())
    sizing = sized(16 * GIB, model=write_gguf(model, tmp_path / "m.gguf"))
    assert sizing.num_parameters == sum(each.numel() for each in model.parameters())
    assert sizing.cards[0].longest == sizing.max_model_len == sizing.cards[0].held[-1].num_tokens


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 262144 exceeds the model's 131072"):
        sized(80 * GIB, max_model_len=262144)


def test_a_family_that_is_not_served_is_refused_with_the_others(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(ModelError, match=r"'mixtral' is not supported; supported: .*llama"):
        sized(80 * GIB, model=path)


def test_the_program_ends_with_2_and_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(tmp_path / "none.json"), "--listen", "unix:-", "--store", "unix:-", "--gpu", "24GiB"]
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(f"gpu_worker: {argv[0]} is no directory or GGUF file")
