"""A worker that starts again on the same disk tier takes only rows that its own weights computed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, VOCAB_SIZE, save_model
from waiting import wait_until

from gpu_worker.config import WorkerConfig
from gpu_worker.records import Budget, CompleteEvent, Event, GenerationRequest, SamplingParams, TokenEvent
from gpu_worker.startup.build import build_engine
from kv_store.local import LocalStore

PROMPT = tuple(torch.randint(3, VOCAB_SIZE, (200,), generator=torch.Generator().manual_seed(0)).tolist())
# Slabs of 64 tokens: two KV heads of 16 numbers.
SLAB_BYTES = 64 * 2 * 2 * 16 * 4
NUM_CACHED = 192


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(CONFIGS["mistral"](), tmp_path / "model")
    return tmp_path / "model"


def ask(model: Path, disk: Path | None, **options: object) -> tuple[int, list[int]]:
    """Start store and worker, ask the prompt, end both: tokens that were known, and the answer."""
    with LocalStore(16 << 20, slab_bytes=SLAB_BYTES, disk=disk) as store:
        config = WorkerConfig(
            model=str(model),
            listen="unix:/unused",
            store=store.target,
            device="cpu",
            slot_memory_bytes=8 << 20,
            **{"dtype": "float32", **options},  # type: ignore[arg-type]
        )
        with closing(build_engine(config, lambda *progress: None).engine) as engine:
            events: list[Event] = []
            request = GenerationRequest(
                request_id="a",
                prompt_token_ids=PROMPT,
                sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
                policy="full",
                budget=Budget(share=1.0),
            )
            engine.submit(request, events.append)

            def is_over() -> bool:
                engine.step()
                return not engine.has_work

            wait_until(is_over)
        store.server.store.settle()
    last = events[-1]
    assert isinstance(last, CompleteEvent)
    return last.usage.cached_tokens, [event.token_id for event in events if isinstance(event, TokenEvent)]


def rewrite(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Other weights of the same path, size and times."""
    path = model / "model.safetensors"
    before, tensors = path.stat(), load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def retrain(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.flip(0).contiguous()


def change_one_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.v_proj.weight"][-1, -1] += 1


def test_equal_weights_take_the_rows_wherever_they_lie(model: Path, tmp_path: Path) -> None:
    first = ask(model, tmp_path / "disk")
    assert first[0] == 0
    assert ask(model, tmp_path / "disk") == (NUM_CACHED, first[1])
    moved = shutil.move(model, tmp_path / "elsewhere")
    os.utime(moved / "model.safetensors", (7, 7))
    assert ask(moved, tmp_path / "disk") == (NUM_CACHED, first[1])


@pytest.mark.parametrize("change", [retrain, change_one_number])
def test_other_weights_of_the_same_path_size_and_time_take_none(
    change: Callable[[dict[str, torch.Tensor]], None], model: Path, tmp_path: Path
) -> None:
    ask(model, tmp_path / "disk")
    rewrite(model, change)
    alone = ask(model, None)
    assert ask(model, tmp_path / "disk") == alone
    assert alone[0] == 0
    # And both are known from then on.
    assert ask(model, tmp_path / "disk") == (NUM_CACHED, alone[1])


@pytest.mark.parametrize(
    "options", [{"load_format": "dummy"}, {"granularity": "q_head"}, {"dtype": "bfloat16"}], ids=str
)
def test_options_that_change_rows_take_none(options: dict[str, object], model: Path, tmp_path: Path) -> None:
    ask(model, tmp_path / "disk")
    assert ask(model, tmp_path / "disk", **options)[0] == 0


def test_a_changed_configuration_takes_none(model: Path, tmp_path: Path) -> None:
    ask(model, tmp_path / "disk")
    text = (model / "config.json").read_text()
    assert '"rope_theta": 10000.0' in text
    (model / "config.json").write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    assert ask(model, tmp_path / "disk")[0] == 0
