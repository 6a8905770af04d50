"""What `carrel serve` refuses before it starts anything."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from carrel.cli import main
from carrel.process.options import OptionError
from carrel.serve.model import BUNDLED
from carrel.serve.one_shot import run_checks
from carrel.serve.process import ChildSpec
from carrel.serve.supervisor import Supervisor


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED, tmp_path / "model"))


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervisor, "run", lambda *arguments: pytest.fail("a process is started"))


def change_config(model: Path, **fields: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def truncate(model: Path) -> None:
    (path,) = model.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:1000])


REFUSALS = {
    "family": (lambda model: change_config(model, model_type="mixtral"), (), "'mixtral'; expected one of"),
    "quantised": (
        lambda model: change_config(model, quantization_config={"bits": 4}),
        (),
        "unquantised model",
    ),
    "RoPE": (lambda model: change_config(model, rope_scaling={"rope_type": "longrope"}), (), "'longrope'"),
    "more layers": (lambda model: change_config(model, num_hidden_layers=99), (), "the weights lack"),
    "truncated weights": (truncate, (), "download it again"),
    "tokenizer": (lambda model: (model / "tokenizer.json").write_text("{}"), (), "cannot be loaded"),
    "sampling": (
        lambda model: (model / "generation_config.json").write_text('{"temperature": 9}'),
        (),
        "temperature is 9",
    ),
    "length": (lambda model: None, ("--max-model-len", "9999999"), "--max-model-len 9999999 exceeds"),
    "device": (lambda model: None, ("--device", "cuda:99"), "--device 'cuda:99'"),
    "policy's option": (
        lambda model: None,
        ("--policy-options", "pqcache:num_subvectors=7"),
        "pqcache:num_subvectors=7",
    ),
    "policy's transport": (
        lambda model: None,
        ("--transport", "grpc", "--policy", "quest"),
        "--policy quest",
    ),
    "calibration": (lambda model: None, ("--calibration", "/etc/hosts"), "--calibration /etc/hosts"),
    "template": (
        lambda model: (model / "broken.jinja").write_text("{% if"),
        ("--chat-template", "{model}/broken.jinja"),
        "--chat-template",
    ),
    "other tokenizer": (lambda model: None, ("--tokenizer", "/etc"), "has no tokenizer.json"),
    "arena": (lambda model: None, ("--arena-bytes", "4T"), "than this machine has free"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_process_would_refuse_is_refused_before_any_is_started(
    model: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spoil, options, text = REFUSALS[name]
    spoil(model)
    given = [word.format(model=model) for word in options]
    assert main(["serve", str(model), "--port", "0", "--grpc-port", "0", *given]) == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert len(errors.splitlines()) == 1, errors


def program(text: str) -> ChildSpec:
    return ChildSpec("check", (sys.executable, "-c", text), lambda: True, 0, 0)


def test_a_check_that_fails_otherwise_is_left_to_its_process() -> None:
    run_checks([program("raise SystemExit(0)"), program("raise ValueError")], {})


def test_the_first_refusal_does_not_wait_for_other_checks() -> None:
    refuses = "import sys; print('a warning', file=sys.stderr); print('p: no: it is bad', file=sys.stderr); sys.exit(2)"
    with pytest.raises(OptionError, match=r"^no: it is bad$"):
        run_checks([program("import time; time.sleep(3600)"), program(refuses)], {})
