"""A method is added in both families as docs/methods.md says, by its own files and lines only, and served."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_rig import Rig, make_model, random_prompt, request
from naive_decoder import first_best, greedy
from torch import Tensor

import gpu_worker.policies
from gpu_worker.policies import registry
from gpu_worker.policies.base import Policy
from gpu_worker.policies.rounding import rounded

PAGE = Path(__file__).resolve().parents[3] / "docs" / "methods.md"
RECALL = Path(__file__).with_name("knorm_recall.py")  # the page links to it
FILE = re.compile(r"```python\n# gpu_worker/policies/(\S+)\n(.*?)```", re.DOTALL)
PROMPT, BUDGET, STEPS = 120, 30, 40


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Policy]]:
    """The registry's, with the page's files beside its own and the page's lines."""
    files = dict(FILE.findall(PAGE.read_text()))
    lines = files.pop("registry.py")
    files["knorm_recall/policy.py"] = RECALL.read_text()
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(text)
        (path.parent / "__init__.py").write_text('"""A method of the page."""\n')
    known = set(sys.modules)
    monkeypatch.setattr(gpu_worker.policies, "__path__", [*gpu_worker.policies.__path__, str(tmp_path)])
    # What is there already stands for the page's dots.
    monkeypatch.setattr(registry, "METHODS", registry.METHODS)
    exec(lines.replace("...", "*METHODS"), vars(registry))
    yield registry.registry()
    for module in set(sys.modules) - known:
        if Path(getattr(sys.modules[module], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[module]


def shortest(keys: Tensor, begin: int, end: int, count: int) -> list[int]:
    return first_best(-rounded(keys[begin:end].norm(dim=-1)), count, begin)


def test_both_are_policies_by_name(policies: dict[str, Policy]) -> None:
    added = set(policies) - {policy for policy in registry.names() if not policy.startswith("knorm")}
    assert added == {"knorm", "knorm+adakv", "knorm+layerwise", "knorm+adakv+layerwise", "knorm_recall"}
    registry.check_name("knorm_recall")


def test_the_retain_policy_keeps_sinks_window_and_the_shortest_keys(policies: dict[str, Policy]) -> None:
    plan = policies["knorm"].plan(PROMPT, BUDGET)
    end = PROMPT - plan.num_recent

    def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
        kept = shortest(keys, plan.num_sink, end, plan.num_selected or 0)
        return [*range(plan.num_sink), *kept, *range(end, len(keys))]

    expected = greedy(make_model(), random_prompt(PROMPT), STEPS, attended)[0]
    rig = Rig(policies=policies)
    assert rig.tokens(request("one", "knorm", BUDGET, max_tokens=STEPS)) == expected
    assert len(rig.tokens(request("other", "knorm+adakv+layerwise", BUDGET, max_tokens=STEPS))) == STEPS
    rig.check_empty()


def test_the_recall_policy_attends_sinks_window_and_the_shortest_keys(policies: dict[str, Policy]) -> None:
    plan = policies["knorm_recall"].plan(PROMPT, BUDGET)

    def attended(layer: int, kv_head: int, queries: Tensor, keys: Tensor) -> list[int]:
        end = len(keys) - 1 - plan.num_recent
        selected = shortest(keys, plan.num_sink, end, plan.num_selected or 0)
        return [*range(plan.num_sink), *selected, *range(end, len(keys))]

    expected = greedy(make_model(), random_prompt(PROMPT), STEPS, attended)[0]
    rig = Rig(policies=policies)
    asked = request("one", "knorm_recall", BUDGET, max_tokens=STEPS)
    beside = request("beside", "knorm", BUDGET, prompt=90, max_tokens=STEPS)
    assert rig.run(asked, beside)[0].tokens == expected
    rig.check_empty()
