"""The benchmark's records, prompts and report, and one run of every rival on a tiny model."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from io import StringIO
from pathlib import Path
from random import Random

import pytest

from benchmarks import cpu_vs_transformers
from benchmarks.cpu_vs_transformers import BASELINE, make_prompts, report, run_rival
from benchmarks.report import cpu_tables, render
from benchmarks.rivals import RIVALS
from benchmarks.rivals.__main__ import main
from benchmarks.runs import Answer, Run, Task, agreement, summarize

MODEL = Path(__file__).resolve().parents[2] / "models" / "carrel-nano"
ANSWER = Answer.from_times((1, 2, 3, 4), 10.0, (10.5, 10.8, 10.81, 10.83))


def test_times_become_gaps() -> None:
    assert ANSWER.ttft_ms == pytest.approx(500)
    assert ANSWER.gaps_ms == pytest.approx((300, 10, 20))


def test_the_wait_for_an_index_is_no_decode_step() -> None:
    slow = replace(ANSWER, ttft_ms=700.0, gaps_ms=(1.0, 30.0, 40.0))
    timing = summarize([Run("a", 4096, (ANSWER,), 10.0, 20.0), Run("a", 4096, (slow,), 12.0, 25.0)])
    assert timing.ttft_ms == pytest.approx(600)
    assert timing.ttft_range_ms == pytest.approx((500, 700))
    assert timing.step_ms == pytest.approx(25)
    assert timing.second_token_ms == pytest.approx(150.5)
    assert (timing.loaded_mib, timing.peak_mib, timing.n) == (11.0, 25.0, 2)


def test_agreement_counts_whole_answers() -> None:
    other = replace(ANSWER, token_ids=(1, 2, 3, 5))
    ours, theirs = [Run("a", 2, (ANSWER, ANSWER), 1, 2)], [Run("b", 2, (ANSWER, other), 1, 2)]
    assert agreement(ours, theirs) == 0.5


def test_prompts_are_exact_and_never_the_same(tmp_path: Path) -> None:
    (tmp_path / "heldout").mkdir()
    rng, words = Random(0), ("the", "of", "sea", "ship", "old", "man", "wind", "night", "came")
    sentences = (" ".join(rng.choices(words, k=9)).capitalize() + "." for _ in range(800))
    with lzma.open(tmp_path / "heldout" / "a.txt.xz", "wt") as file:
        file.write("\n\n".join(sentences))
    for books in (tmp_path, None):
        prompts = make_prompts(MODEL, books, 1024, 3, seed=1)
        assert {len(prompt) for prompt in prompts} == {1024}
        assert len(set(prompts)) == 3


def test_the_report_holds_ratios_and_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slower = replace(ANSWER, ttft_ms=600.0, gaps_ms=(300.0, 20.0, 20.0))
    runs = {
        ("carrel full", 4096): [Run("carrel full", 4096, (slower,), 10.0, 30.0)],
        (BASELINE, 4096): [Run(BASELINE, 4096, (ANSWER,), 10.0, 20.0)],
    }
    content = report(runs)
    row = next(row for row in content["timings"] if row["rival"] == "carrel full")
    assert (row["ttft_ratio"], row["peak_ratio"], row["same_answers"]) == (pytest.approx(1.2), 1.5, 1.0)
    shown = cpu_tables(content)
    assert "first token at 4K: 1.20 of transformers generate (target: at most 1.3): met" in shown
    assert "dense decode step at 4K: 1.33 of transformers generate (target: at most 1.2): MISSED" in shown
    path = tmp_path / "cpu_vs_transformers.json"
    machine = {"cpu": "a processor", "cores": 2, "memory_gib": 8}
    about = {"command": "x", "machine": machine, "versions": {"carrel": "0"}, "date": "today"}
    path.write_text(json.dumps({"about": about, **content}))
    assert "`x` on a processor, 2 cores, 8 GiB; carrel 0; today." in render(path)


def test_a_rival_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="carrel full ended with"):
        run_rival("carrel full", Task("/no/such/model", ((1, 2),), 2, 1), timeout_s=120)


@pytest.mark.e2e
def test_every_rival_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    rng = Random(0)
    prompt = tuple(rng.randrange(3, 128) for _ in range(600))
    task = Task(str(tmp_path), (prompt,), num_steps=4, num_threads=1)
    runs = {"carrel full": run_rival("carrel full", task, timeout_s=120)}
    # as their processes would, but in this one, which has imported `transformers`
    for name in ("transformers generate", "transformers forward"):
        monkeypatch.setattr("sys.stdin", StringIO(task.to_json()))
        main(name)
        runs[name] = Run.from_json(capsys.readouterr().out.splitlines()[-1])
    assert set(runs) == set(RIVALS) - {"carrel pqcache"}
    answers = {name: run.answers[0].token_ids for name, run in runs.items()}
    assert len(set(answers.values())) == 1, answers
    for run in runs.values():
        assert len(run.answers[0].gaps_ms) == 4
        # Linux counts a thread's resident pages only every so many, and the peak when it does.
        assert run.peak_mib + 1 >= run.loaded_mib > 0
    content = cpu_vs_transformers.report({(name, 600): [run] for name, run in runs.items()})
    assert all(row["same_answers"] == 1 for row in content["timings"])
