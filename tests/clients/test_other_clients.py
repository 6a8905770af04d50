"""Programs that people use, unchanged, against a real server; `make test-clients` has them in a venv of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import Serving, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = ROOT / "models" / "carrel-nano"
QUESTION = "The secret number of the amber fox is 48213.\n\nWhat is the secret number of the amber fox?"
pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--dtype", "float32") as running:
        yield running


def ask(script: str, *arguments: str, question: Any) -> Any:
    """Run a script in the clients' environment, and return the JSON of its last line."""
    command = [os.environ["CLIENTS_PYTHON"], str(HERE / script), *arguments]
    done = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def items() -> list[tuple[str, str]]:
    """Twenty beginnings and what follows each: short ones, and long ones that a chunk of a prompt does not hold."""
    book = next((ROOT / "examples" / "documents").glob("*.txt")).read_text()
    words = book.split()
    lengths = [3, 10, 40, 150, 700]
    return [
        (" ".join(words[at : at + length]), " " + " ".join(words[at + length : at + length + 4]))
        for at, length in ((500 * number, lengths[number % len(lengths)]) for number in range(20))
    ]


def test_lm_eval_measures_what_transformers_computes(server: Serving) -> None:
    asked = items()
    told = ask("ask_lm_eval.py", server.url, str(MODEL), question=asked)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    differences = []
    for (context, following), (loglikelihood, is_greedy) in zip(asked, told, strict=True):
        # lm_eval asks for no begin token
        whole = tokenizer.encode(context + following, add_special_tokens=False)
        begin = len(tokenizer.encode(context, add_special_tokens=False))
        with torch.inference_mode():
            logprobs = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
        following_ids = torch.tensor(whole[begin:])
        of_following = logprobs[begin - 1 : -1]
        expected = of_following.gather(-1, following_ids[:, None]).sum().item()
        differences.append(abs(loglikelihood - expected))
        assert is_greedy == (of_following.argmax(-1) == following_ids).all().item()
    # that of float32, which the shapes of the products and the processor's kernels for them decide: transformers itself
    # is as far from its own float64
    print(f"the largest of {len(differences)} differences is {max(differences):.2e}")
    assert max(differences) < 1e-3


def test_langchain(server: Serving) -> None:
    told = ask("ask_langchain.py", server.url, question=QUESTION)
    assert told["whole"] == "".join(told["pieces"]) != ""
    assert len(told["pieces"]) > 2
    assert 0 < told["tokens"] <= 24
    # a model that knows nothing of tools has to call one
    assert told["calls"]
    assert all(name == "weather" and given["city"] in ("Rome", "Paris") for name, given in told["calls"])


def test_litellm(server: Serving) -> None:
    told = ask("ask_litellm.py", server.url, question=QUESTION)
    for name, answer in told.items():
        assert answer["whole"] == "".join(answer["pieces"]) != "", name
        assert 0 < answer["tokens"] <= 24
    assert len({answer["whole"] for answer in told.values()}) == 1


def lost(told: Any, kept: Any, at: str = "") -> list[str]:
    """Where `kept` lacks, or has otherwise, what `told` has."""
    if isinstance(told, dict) and isinstance(kept, dict):
        return [each for key in told for each in lost(told[key], kept.get(key), f"{at}.{key}")]
    if isinstance(told, list) and isinstance(kept, list) and len(told) == len(kept):
        return [
            each for n, pair in enumerate(zip(told, kept, strict=True)) for each in lost(*pair, f"{at}.{n}")
        ]
    return [] if told == kept else [at]


def test_grafanas_own_types_know_all_of_the_board() -> None:
    board = json.loads((ROOT / "deploy" / "monitoring" / "boards" / "carrel.json").read_text())
    told = ask("ask_grafana.py", question=board)
    assert lost(board, told["board"]) == []
    drawn = [panel for panel in board["panels"] if panel["type"] != "row"]
    expected = [
        f"grafana_foundation_sdk.models.{name}"
        for panel in drawn
        for name in (panel["type"], *(target["datasource"]["type"] for target in panel["targets"]))
    ]
    assert told["types"] == expected
    # what a panel's type asks for and the board leaves out would be as the types have it, a legend hidden
    read = [panel for panel in told["board"]["panels"] if panel["type"] != "row"]
    for before, after in zip(drawn, read, strict=True):
        assert lost(after["options"], before["options"], before["title"]) == []


def test_langchain_as_the_page_has_it(server: Serving) -> None:
    page = (ROOT / "docs" / "clients.md").read_text()
    [program] = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "langchain" in each]
    command = [os.environ["CLIENTS_PYTHON"], "-c", program.replace("http://127.0.0.1:8000", server.url)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout.strip() != "") == (0, True), done.stderr[-3000:]


def test_lm_eval_runs_a_papers_task_on_a_file(server: Serving, tmp_path: Path) -> None:
    """LongBench's qasper with its own prompt and metric, and a file of two questions in place of its data."""
    facts = {"amber fox": "48213", "grey owl": "77120"}
    lines = [
        {
            "context": f"The secret number of the {who} is {number}. " * 20,
            "question": f"What is the secret number of the {who}?",
            "answers": [number],
        }
        for who, number in facts.items()
    ]
    (tmp_path / "qasper.jsonl").write_text("\n".join(map(json.dumps, lines)))
    clients = Path(os.environ["CLIENTS_PYTHON"])
    (task,) = clients.parent.parent.glob("lib/python3*/site-packages/lm_eval/tasks/longbench/qasper.yaml")
    (tmp_path / "own.yaml").write_text(
        f"include: {task}\ntask: own_qasper\ntag: []\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / 'qasper.jsonl'}\n"
    )
    model = f"model=carrel-nano,base_url={server.url}/v1/completions,tokenizer={MODEL},max_length=8192"
    options = ["--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples"]
    command = [str(clients), "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", "own_qasper", *map(str, options)]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())
    assert found["n-samples"]["own_qasper"]["effective"] == len(facts)
    assert 0 <= found["results"]["own_qasper"]["qa_f1_score,none"] <= 1
    (samples,) = (tmp_path / "out").rglob("samples_own_qasper_*.jsonl")
    for sample in map(json.loads, samples.read_text().splitlines()):
        prompt = sample["arguments"]["gen_args_0"]["arg_0"]
        body = {"model": "carrel-nano", "prompt": prompt, "max_tokens": 128, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
        assert sample["resps"] == [[answer["choices"][0]["text"]]]
