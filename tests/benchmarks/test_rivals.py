"""The rivals of decode and prefill: each computes what it says, and fails as it should."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from benchmarks.children import answers_of, wait_or_kill
from benchmarks.comparison import measure_rivals
from benchmarks.errors import BenchmarkError, NotMeasurable
from benchmarks.figures import DecodeCase, DecodeFigures, PrefillCase, Spread
from benchmarks.rivals import BASELINE, DECODE, PREFILL
from benchmarks.rivals.child import measure_all
from benchmarks.rivals.dense_model import DenseModel
from benchmarks.rivals.minimal_dense import attend_causally
from benchmarks.shapes import SHAPES
from carrel.progress import RunProgress

CPU, TINY = torch.device("cpu"), SHAPES["tiny"]
CASE = DecodeCase("tiny", "full", None, 2, 64, None, None, 3)


@torch.inference_mode()
def test_the_dense_model_is_a_llama() -> None:
    transformers = pytest.importorskip("transformers")
    shape = replace(TINY, vocab_size=500)
    ours = DenseModel(shape, CPU, torch.float32)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape.config_fields())).eval()
    state = {"model.embed_tokens.weight": ours.embed, "lm_head.weight": ours.head}
    state["model.norm.weight"] = ours.final_norm
    for index, layer in enumerate(ours.layers):
        prefix = f"model.layers.{index}"
        heads = [num * shape.head_dim for num in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        for name, matrix in zip("qkv", layer.qkv.split(heads), strict=True):
            state[f"{prefix}.self_attn.{name}_proj.weight"] = matrix
        gate, up = layer.gate_up.chunk(2)
        state |= {
            f"{prefix}.self_attn.o_proj.weight": layer.output,
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
            f"{prefix}.mlp.down_proj.weight": layer.down,
            f"{prefix}.input_layernorm.weight": layer.input_norm,
            f"{prefix}.post_attention_layernorm.weight": layer.mlp_norm,
        }
    theirs.load_state_dict(state)
    prompt = torch.randint(500, (40,), generator=torch.Generator().manual_seed(2))
    found = ours.next_tokens(prompt, ours.rotation(torch.arange(40)), attend_causally, 40)
    assert found.tolist() == theirs(prompt[None]).logits[0].argmax(-1).tolist()


@pytest.mark.parametrize("name", [BASELINE, "weights only", "transformers"])
def test_rivals_decode(name: str) -> None:
    rival = DECODE.rivals[name].load()(TINY, CPU)
    for case in (CASE, replace(CASE, batch=1, context=100)):
        figures = rival.measure(case)
        assert figures.step_ms.n == 3
        assert figures.step_ms.median > 0
        assert figures.attended_tokens == (0 if name == "weights only" else case.context)
        assert figures.hit_rate is None


@pytest.mark.parametrize("name", [BASELINE, "transformers"])
def test_rivals_prefill(name: str) -> None:
    figures = PREFILL.rivals[name].load()(TINY, CPU).measure(PrefillCase("tiny", "full", None, 64, None, 2))
    assert figures.ttft_ms.n == 2
    assert (figures.tt2t_ms is None) == (name == BASELINE)


def test_the_offloaded_cache_needs_a_gpu() -> None:
    with pytest.raises(NotMeasurable, match="GPU"):
        DECODE.rivals["transformers offloaded"].load()(TINY, CPU)


def test_a_case_that_does_not_fit_does_not_end_the_run() -> None:
    figures = DecodeFigures(Spread(1.0, 1.0, 1.0, 1), 1)
    answers = iter(
        [torch.OutOfMemoryError("CUDA out of memory"), NotMeasurable("no\nmore"), ValueError("odd"), figures]
    )

    def measure(case: DecodeCase) -> DecodeFigures:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    out = io.StringIO()
    measure_all(measure, [CASE] * 4, CPU, out)
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    last = [answer.get("error", "-").splitlines()[-1] for answer in told]
    assert last == ["out of device memory", "no", "ValueError: odd", "-"]
    assert told[3]["figures"]["device_bytes"] == 1


def test_a_child_that_fails_has_its_last_words_told() -> None:
    task = {"cases": [], "device": "cpu", "shape": "tiny"}
    with pytest.raises(BenchmarkError, match=r"decode nobody ended with 1[^$]*KeyError: 'nobody'"):
        list(answers_of("benchmarks.rivals.child", ["decode", "nobody"], task))


def test_a_child_that_does_not_end_is_killed() -> None:
    willing = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert willing.stdin is not None
    willing.stdin.close()
    wait_or_kill(willing, 60)
    assert willing.returncode == 0
    unwilling = subprocess.Popen(["sleep", "60"])
    wait_or_kill(unwilling, 0.01)
    assert unwilling.returncode == -signal.SIGKILL


def test_rounds_turn_and_the_other_rivals_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def answers(_module: str, arguments: list[str], task: dict[str, Any]) -> Iterator[dict[str, Any]]:
        started.append(arguments[1])
        for index, fields in enumerate(task["cases"]):
            if arguments[1] == "carrel" and index:
                raise BenchmarkError("carrel ended with -9: killed")
            yield {"figures": asdict(DecodeFigures(Spread(fields["batch"], 1.0, 9.0, 5), 1))}

    monkeypatch.setattr("benchmarks.comparison.answers_of", answers)
    other = replace(CASE, batch=1)
    plan = {BASELINE: [CASE, other], "carrel": [CASE, other]}
    with RunProgress(8) as progress:
        outcomes = measure_rivals(DECODE, plan, "tiny", "cpu", 2, progress)
    assert started == [BASELINE, "carrel", "carrel", BASELINE]
    assert [(outcome.rival, outcome.case) for outcome in outcomes] == [
        (name, case) for name, cases in plan.items() for case in cases
    ]
    assert [outcome.error for outcome in outcomes] == [None, None, None, "carrel ended with -9: killed"]
    assert outcomes[0].figures is not None
    assert outcomes[0].figures.step_ms == Spread(2.0, 1.0, 9.0, 10)
    assert outcomes[3].figures is None
    assert "round 2/2, minimal dense, 64x1 full: 1.000 ms a step" in capsys.readouterr().err
