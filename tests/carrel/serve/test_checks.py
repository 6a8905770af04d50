"""Test what `carrel serve` refuses before it starts anything."""

from __future__ import annotations

import io
import json
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from commands import Command
from safetensors.torch import load_file, save_file

from carrel.commands import serve
from carrel.errors import ModelNotFoundError
from carrel.process.options import OptionError
from carrel.serve.model import BUNDLED, check_hub_model, find_model
from carrel.serve.one_shot import run_checks
from carrel.serve.process import ChildSpec
from carrel.serve.supervisor import Supervisor


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervisor, "run", lambda *arguments: pytest.fail("a process is started"))


def refused(carrel: Command, model: Path, *options: str) -> str:
    """Return the one line of a refusal."""
    ended = carrel("serve", model, "--port", "0", "--grpc-port", "0", *options)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    return ended.err


def run_here(specs: Sequence[ChildSpec], environment: object) -> None:
    """Run the checks in this process, which has their libraries: `run_checks` loads them for each test."""
    for spec in specs:
        place = spec.argv.index("-m")
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as said:
            patch.setattr(sys, "argv", list(spec.argv[place + 1 :]))
            with pytest.raises(SystemExit) as ended:
                runpy.run_module(spec.argv[place + 1], run_name="__main__")
        if ended.value.code == 2:
            raise OptionError(said.getvalue().splitlines()[-1].partition(": ")[2])


def changed(**fields: object) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_text(text)


def truncated(model: Path) -> None:
    (path,) = model.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:1000])


def in_five_bits(model: Path) -> None:
    """Store all weights in a type that no format has."""
    (path,) = model.glob("*.safetensors")
    tensors = load_file(path)
    save_file({name: each.to(torch.float8_e5m2) for name, each in tensors.items()}, path)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (changed(model_type="mixtral"), "model_type 'mixtral' is not supported; supported: arcee, cohere,"),
        (changed(architectures=["LlamaForTokenClassification"]), "expected a model that writes text"),
        (in_five_bits, "quantised in an unknown way"),
        (changed(rope_scaling={"rope_type": "proportional"}), "'proportional'"),
        (changed(num_hidden_layers=99), "the weights lack"),
        (truncated, "download it again"),
        (written("tokenizer.json", "{}"), "cannot be loaded"),
        (written("generation_config.json", '{"temperature": 9}'), "temperature is 9"),
    ],
)
def test_a_model_that_a_process_would_refuse_is_refused_before_any_is_started(
    spoil: Callable[[Path], object],
    text: str,
    tmp_path: Path,
    carrel: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "run_checks", run_here)
    model = Path(shutil.copytree(BUNDLED, tmp_path / "model"))
    spoil(model)
    assert text in refused(carrel, model)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--max-model-len", "9999999"], "--max-model-len 9999999 exceeds"),
        (["--max-model-len", "16M"], "--max-model-len 16777216 exceeds"),
        (["--max-model-len", "much"], "must be a number of tokens such as 131072, 128K or 1M"),
        (["--rope-scaling", "yarn"], "--hf-overrides 'yarn'"),
        (["--rope-scaling", '{"rope_type": "yarn"}'], "field 'factor' is missing"),
        (["--hf-overrides", '{"max_positions": 4}'], "has no field 'max_positions'; check its name"),
        (["--device", "cuda:99"], "--device 'cuda:99'"),
        (["--policy-options", "pqcache:num_subvectors=7"], "pqcache:num_subvectors=7"),
        (["--policy-options", "pages:size=4"], "--policy-options: no policy 'pages' has options"),
        (["--transport", "grpc", "--policy", "quest"], "--policy quest"),
        (["--policy", "bitkey"], "did you mean bitkeys?"),
        (["--policy", "nothing"], "--policy: unknown policy 'nothing'; choose one of auto, bitkeys, cam"),
        (["--policy", "chelsea+outliers"], "unknown policy 'chelsea+outliers'"),
        (["--budget", "7.5"], "--budget '7.5'"),
        (["--hot-cache", "0"], "from 2 up, or auto"),
        (["--calibration", "/etc/hosts"], "--calibration /etc/hosts"),
        (["--chat-template", "broken.jinja"], "--chat-template broken.jinja"),
        (["--chat-template", "/no/such.jinja"], "--chat-template /no/such.jinja: there is no such file"),
        (["--tokenizer", "/etc"], "has no tokenizer.json"),
        (["--arena-bytes", "4T"], "than this machine has free"),
        (["--arena-bytes", "5000"], "--slab-bytes"),
        (["--trust-remote-code"], "runs no code that a checkpoint brings"),
        (["--host", "0.0.0.0"], "--allow-open"),
    ],
)
def test_options_that_a_process_would_refuse_are_refused_before_any_is_started(
    options: list[str], text: str, tmp_path: Path, carrel: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "run_checks", run_here)
    monkeypatch.chdir(tmp_path)
    Path("broken.jinja").write_text("{% if")
    assert text in refused(carrel, BUNDLED, *options)


@pytest.mark.parametrize(
    "fields",
    [{"model_type": "gemma3_text"}, {"model_type": "qwen2", "architectures": ["Qwen2ForRewardModel"]}],
)
def test_a_family_that_is_not_served_is_refused_before_any_library_is_loaded(
    fields: dict[str, object], tmp_path: Path, carrel: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "run_checks", lambda *arguments: pytest.fail("a check is started"))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert str(tmp_path / "config.json") in refused(carrel, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": 7}', '{"architectures": "a"}'])
def test_a_config_that_cannot_be_read_is_left_to_the_checks(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert find_model(str(tmp_path)) == str(tmp_path)


def test_the_checks_run_in_processes_of_their_own(carrel: Command) -> None:
    assert "--device 'cuda:99'" in refused(carrel, BUNDLED, "--device", "cuda:99")


def test_a_model_that_the_hub_does_not_give_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check_hub_model(str(tmp_path), None)
    for name in ("owner/name", "owner/na me"):
        with pytest.raises(ModelNotFoundError, match=f"no model directory or GGUF file {name}"):
            check_hub_model(name, None)


def program(text: str) -> ChildSpec:
    return ChildSpec("check", (sys.executable, "-c", text), lambda: True, 0, 0)


def test_a_check_that_fails_otherwise_is_left_to_its_process() -> None:
    run_checks([program("raise SystemExit(0)"), program("raise ValueError")], {})


def test_the_first_refusal_does_not_wait_for_other_checks() -> None:
    refuses = "import sys; print('a warning', file=sys.stderr); print('p: no: it is bad', file=sys.stderr); sys.exit(2)"
    with pytest.raises(OptionError, match=r"^no: it is bad$"):
        run_checks([program("import time; time.sleep(3600)"), program(refuses)], {})
