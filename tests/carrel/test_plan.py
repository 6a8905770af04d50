"""`carrel plan`: tables and JSON of what GPUs hold, and refusals before and after PyTorch is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Command

from carrel.commands import plan
from carrel.process.sizing import Card, Held, Sizing
from carrel.process.version import CHECKOUT

GIB = 1 << 30
NANO = CHECKOUT / "models" / "carrel-nano"
SIZING = Sizing(
    dtype="bfloat16",
    num_parameters=8_030_261_248,
    weight_bytes=15 * GIB,
    token_bytes=131072,
    max_model_len=131072,
    policy="bitkeys",
    budget="a budget of 0.1",
    recalls=True,
    host_bytes=None,
    cards=(
        Card(16 * GIB, 0, missing_bytes=2 * GIB),
        Card(20 * GIB, 46080, 0, 256, 1_003_632_286, (Held(8192, 111, 256), Held(131072, 0, 0))),
    ),
)


def test_the_bundled_model_is_planned_in_a_process(carrel: Command, tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    out = carrel.output("plan", NANO / "config.json", "--gpu", "2GiB", "1.5T", "--policy-options",
                        "pqcache:num_bits=5", "pqcache:recent_ratio=0.25", "--json", path)  # fmt: skip
    written = json.loads(path.read_text())
    assert written["options"] == {"policy_options": "pqcache:num_bits=5,pqcache:recent_ratio=0.25"}
    assert (written["max_model_len"], written["host_bytes"]) == (32768, None)
    small, large = written["cards"]
    assert (large["num_bytes"], large["seats"], large["longest"]) == (1536 * GIB, 256, 32768)
    assert small["seats"] < 256
    for card in (small, large):
        assert f"| {card['kv_tokens']:,} |" in out
        for held in card["held"]:
            assert f" {held['dense']} / {held['selecting']} |" in out


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "read_sizing", lambda *_: SIZING)


@pytest.mark.usefixtures("planned")
def test_the_tables_say_what_does_not_fit_and_what_must_be_set(carrel: Command) -> None:
    out = carrel.output("plan")
    assert out.startswith("8,030 million parameters: 15.0 GiB in bfloat16;")
    assert "| 16 | - | - | does not fit: 2.0 GiB missing |" in out
    assert "| 20 | 256 | 1,003,632,286 | 45K |" in out
    assert "| GPU, GiB | 8K | 128K |" in out
    assert "| 20 | 111 / 256 | 0 / 0 |" in out
    assert "--max-model-len" in out


@pytest.mark.usefixtures("planned")
def test_on_a_terminal_no_cell_is_broken_at_80_columns(
    carrel: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    out = carrel.output("plan")
    for cell in ("does not fit: 2.0 GiB missing", "1,003,632,286", "111 / 256", "longest context"):
        assert cell in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "24"], "24 is 24 bytes; give at least 2GiB, with the unit, such as 24GiB"),
        (["--gpu", "many"], "many: must be a size such as 8G"),
        (["--policy", "nope"], "--policy: unknown policy 'nope'; choose one of"),
        (["--max-model-len", "1"], "--max-model-len '1'"),
        (["no/such/model"], "no model directory or GGUF file at no/such/model"),
        (["no-such.json"], "no file no-such.json; give a config.json"),
        ([str(NANO), "--max-model-len", "64K"], "exceeds the model's 32768; give at most that"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], said: str, carrel: Command) -> None:
    assert said in carrel.refusal("plan", *words)


def test_without_a_worker_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, carrel: Command) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert "Install carrel[gpu-worker]" in carrel.refusal("plan", code=1)
