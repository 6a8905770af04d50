"""Faults that start-up refuses before it looks for a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gpu_worker.calibration import ModelFacts, Observation, write_calibration
from gpu_worker.config import WorkerConfig
from gpu_worker.engine.engine import Engine
from gpu_worker.errors import ConfigError, ModelError
from gpu_worker.startup.build import build_engine, check_options
from kv_store.local import LocalStore

MODEL = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_options": ("pqcache:num_subvectors=3",)}, "pqcache:num_subvectors=3 .* 16"),
        ({"policy": "nothing"}, "--policy: unknown policy 'nothing'; choose one of auto, "),
        ({"gpu_memory_limit": 2**30}, "--gpu-memory-limit 1073741824 .* cpu"),
        ({"max_model_len": 129}, "--max-model-len 129 .* 128"),
        ({"policy": "chelsea+outliers"}, "unknown policy 'chelsea.outliers'"),
        ({"calibration": "/none"}, "--calibration /none cannot be read"),
    ],
)
def test_options_that_contradict_the_model_are_refused(changes: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, **changes)
    # and before anything is loaded, as `carrel serve` asks
    with pytest.raises(ConfigError, match=message):
        check_options(worker_config(tmp_path, **changes))


def test_what_is_no_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    check_options(worker_config(tmp_path))
    # of the hub, and not in its cache: known when it comes
    check_options(worker_config("owner/a-model-that-is-not-there"))
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        check_options(worker_config(tmp_path, load_format="safetensors"))
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 4096}))
    with pytest.raises(ConfigError, match="--slot-memory 1048576"):
        check_options(worker_config(tmp_path, slot_memory_bytes=1 << 20))
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "model_type": "mixtral"}))
    with pytest.raises(ModelError, match="'mixtral'"):
        check_options(worker_config(tmp_path))


def worker_config(model: Path | str, store: str = "unix:/nowhere", **options: object) -> WorkerConfig:
    chosen = {"load_format": "dummy", **options}
    return WorkerConfig(model=str(model), listen="unix:/unused", store=store, device="cpu", **chosen)


def start(model: Path, store: str = "unix:/nowhere", **options: object) -> Engine:
    return build_engine(worker_config(model, store, **options), lambda *progress: None).engine


def test_clients_hear_of_the_policies_that_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with LocalStore(16 << 20) as store:
        engine = start(
            tmp_path,
            store.target,
            slot_memory_bytes=8 << 20,
            policy="full",
            allowed_policies=("snapkv", "full"),
        )
        engine.close()
    assert engine.info.policies == ("full", "snapkv")


@pytest.mark.parametrize(
    ("slots", "arena", "seats", "capacity"), [(68, 16, 9, 2), (500, 2, 9, 2), (500, 16, 3, 3)]
)
def test_the_plan_says_how_many_of_the_longest_requests_fit_side_by_side(
    slots: int, arena: int, seats: int, capacity: int, tmp_path: Path
) -> None:
    """As many as the pool, the arena and the seats have; a request takes 64 MiB beside slots for gaps between pages."""
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "max_position_embeddings": 4096}))
    with LocalStore(arena << 20) as store:
        engine = start(
            tmp_path, store.target, slot_memory_bytes=2 * slots << 20, policy="full", max_num_seqs=seats
        )
        engine.close()
    assert engine.info.context_capacity == engine.stats().context_capacity == capacity


def test_a_calibration_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    path = tmp_path / "calibration.safetensors"
    facts = ModelFacts("llama", 3, 2, 1, 16, 32, 50)
    write_calibration(path, facts, Observation(torch.zeros(3, 1), torch.zeros(3, 1, 16, 16)), {"model": "m"})
    with pytest.raises(ConfigError, match=r"is of m \(llama, 3 layers.*another \(llama, 2 layers"):
        start(tmp_path, calibration=str(path), policy="chelsea+outliers")
