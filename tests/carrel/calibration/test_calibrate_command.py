"""`carrel calibrate` with the bundled model: its file serves a worker, and what is wrong is told in a line."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
from commands import Command
from safetensors import safe_open

from carrel.commands import calibrate
from carrel.errors import ChildError
from carrel.serve.model import BUNDLED
from gpu_worker.config import WorkerConfig
from gpu_worker.records import (
    Budget,
    CompleteEvent,
    ErrorEvent,
    Event,
    GenerationRequest,
    SamplingParams,
)
from gpu_worker.startup.build import build_engine
from kv_store.local import LocalStore

needs_model = pytest.mark.skipif(
    not (BUNDLED / "model.safetensors").exists(), reason="the bundled model is not here"
)
WORDS = ("the", "of", "and", "sea", "ship", "old", "man", "wind", "long", "night", "came", "water", "nobody")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng, path = random.Random(0), tmp_path / "text.txt"
    path.write_text(" ".join(rng.choices(WORDS, k=1200)))
    return path


@needs_model
def test_its_file_serves_a_worker(
    text: Path, tmp_path: Path, carrel: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a folder of the same name where the user stands is not taken for ours
    (tmp_path / "gpu_worker").mkdir()
    (tmp_path / "gpu_worker" / "__init__.py").write_text("raise SystemExit(77)")
    monkeypatch.chdir(tmp_path)
    argv = ["calibrate", "--text", "text.txt", "--out", "nano.safetensors", "--device", "cpu"]
    argv += ["--tokens", "600", "--length", "300", "--share", "0.2", "--threshold", "0.85", "--threads", "1"]
    ended = carrel(*argv)
    assert ended.code == 0
    assert ended.out.startswith("outlier heads, 3 of 16: layer ")
    assert "2 samples, 600 tokens in all\n" in ended.err
    assert "calibrate: done\n" in ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu_worker", "nano.safetensors", "text.txt"]
    with safe_open("nano.safetensors", framework="pt") as file:
        about = file.metadata()
    assert (about["model"], about["num_tokens"], about["threshold"]) == ("carrel-nano", "600", "0.85")

    policies = answer_with(tmp_path / "nano.safetensors", ["chelsea+outliers", "infinigen", "chelsea"])
    assert "chelsea+outliers" in policies


def answer_with(calibration: Path, policies: list[str]) -> tuple[str, ...]:
    """Return the methods that a worker with this file offers after each of these policies has answered."""
    events: list[Event] = []
    with LocalStore(64 << 20) as store:
        config = WorkerConfig(
            model=str(BUNDLED),
            listen="unix:/unused",
            store=store.target,
            device="cpu",
            max_model_len=512,
            slot_memory_bytes=32 << 20,
            max_num_seqs=2,
            policy="chelsea+outliers",
            budget=Budget(share=0.5),
            calibration=str(calibration),
            policy_options=("chelsea+outliers:share=0.1",),
        )
        engine = build_engine(config, lambda *progress: None).engine
        try:
            for policy in policies:
                prompt = tuple(6 + place % 500 for place in range(400))
                sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
                request = GenerationRequest(policy, prompt, sampling, policy, Budget(share=0.5))
                engine.submit(request, events.append)
            while engine.has_work:
                engine.step()
        finally:
            engine.close()
        assert [event for event in events if isinstance(event, ErrorEvent)] == []
        assert sum(isinstance(event, CompleteEvent) for event in events) == len(policies)
        return engine.info.policies


@needs_model
def test_what_the_process_refuses_is_told_in_a_line(text: Path, tmp_path: Path, carrel: Command) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"what was there")
    said = carrel.refusal("calibrate", "--text", text, "--out", out, "--device", "cuda:99")
    error = said.splitlines()[-1]
    assert error.startswith("carrel calibrate: error: --device 'cuda:99'")
    assert out.read_bytes() == b"what was there"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--text": "/no/such/text"}, "cannot read /no/such/text"),
        ({"--out": "/etc/hosts/file"}, "/etc/hosts is no folder"),
        ({"--out": "/tmp"}, "argument --out: /tmp is a folder"),
        ({"model": "/no/such/model"}, "no model directory or GGUF file at /no/such/model"),
    ],
)
def test_what_is_missing_is_told_before_the_model_loads(
    changes: dict[str, str], message: str, text: Path, tmp_path: Path, carrel: Command
) -> None:
    given = {"model": str(BUNDLED), "--text": str(text), "--out": str(tmp_path / "out"), **changes}
    model = given.pop("model")
    words = (part for flag in given.items() for part in flag)
    error = carrel.refusal("calibrate", model, *words).splitlines()[-1]
    assert error.startswith("carrel calibrate: error: ")
    assert message in error


def test_a_process_that_dies_and_a_missing_library_are_told(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carrel: Command
) -> None:
    def dies(*arguments: object) -> list[str]:
        raise ChildError("the calibration ended with signal SIGKILL: it said nothing")

    monkeypatch.setattr(calibrate, "calibrate", dies)
    argv = ("calibrate", "--text", text, "--out", tmp_path / "out")
    assert "signal SIGKILL" in carrel.refusal(*argv, code=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs transformers, torch, safetensors: pip install" in carrel.refusal(*argv, code=1)
