"""The programs on the page of clients run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gateway_stack import Stack

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
# LangChain's need packages of their own
PROGRAMS = [
    program
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    if "langchain" not in program
]


@pytest.mark.parametrize("program", PROGRAMS, ids=["once", "many", "batch", "document"])
def test_it_runs(
    program: str,
    stack: Stack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    stack.say("the fox")
    told = program.replace("http://127.0.0.1:8000", stack.url).replace("carrel-nano", "tiny")
    exec(compile(told, str(PAGE), "exec"), {"__name__": "__main__"})
    batch = tmp_path / "answers.jsonl"
    said = capsys.readouterr().out + (batch.read_text() if batch.exists() else "")
    assert said.count("the fox") == (2 if len(stack.script.requests) == 2 else 20)
