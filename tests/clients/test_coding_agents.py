"""Coding agents, set up as their page says, against a scripted model that calls the agent's shell and then answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_worker import Script
from gateway_stack import Stack, running_stack, write_tokenizer

from gpu_worker.v1 import gpu_worker_pb2 as pb

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()
MAX_MODEL_LEN = 2**18
FILE, ANSWER, QUESTION = "amber-fox.txt", "It is a fox.", "Which files are here?"
LISTING = {"command": "ls", "description": "list files"}

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: it needs node and npm")
    return found


def block(kind: str, word: str, stack: Stack) -> str:
    """Return the page's block of this kind with this word, for the server of a test."""
    [text] = [each for each in re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) if word in each]
    return text.replace("http://127.0.0.1:8000", stack.url)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("agents")
    [patterns] = re.findall(r"--served-model-alias (.*)$", PAGE, re.MULTILINE)
    names = {
        "served_model_names": ("Qwen3-8B",),
        "served_model_aliases": tuple(patterns.replace("'", "").split()),
    }
    with running_stack(folder, write_tokenizer(folder / "model"), MAX_MODEL_LEN, **names) as stack:
        yield stack


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A repository with one file, beside an empty home."""
    (tmp_path / "home").mkdir()
    work = tmp_path / "work"
    work.mkdir()
    (work / FILE).write_text("x")
    subprocess.run(["git", "init", "--quiet"], cwd=work, check=True)
    return work


def prompt_of(stack: Stack, request: pb.GenerateRequest) -> str:
    return stack.tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)


def calls(stack: Stack, tool: str, arguments: dict[str, str]) -> None:
    """Script a model that calls the tool where it is offered, and answers once the call was."""

    def answer(request: pb.GenerateRequest) -> list[int]:
        prompt = prompt_of(stack, request)
        is_answered = "\n</tool_response>" in prompt.rpartition("<|user|>")[2]
        call = json.dumps({"name": tool, "arguments": arguments})
        is_called = f'"name": "{tool}"' in prompt and not is_answered
        text = f"<tool_call>\n{call}\n</tool_call>" if is_called else ANSWER
        ids: list[int] = stack.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    stack.script = Script(answer=answer)


def run(stack: Stack, work: Path, command: list[str], **variables: str) -> None:
    """Run an agent to its end: it must have run the shell, and say the model's answer."""
    known = {"PATH": os.environ["PATH"], "HOME": str(work.parent / "home"), "TERM": "dumb"}
    done = subprocess.run(
        command,
        cwd=work,
        env=known | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert ANSWER in done.stdout
    last = prompt_of(stack, stack.script.requests[-1])
    assert FILE in last.rpartition("<tool_response>")[2]


@pytest.mark.parametrize("model", ["Qwen3-8B", "gpt-5.5"])
def test_codex(stack: Stack, work: Path, model: str) -> None:
    command = [
        program("codex"),
        "exec",
        "-m",
        model,
        "--skip-git-repo-check",
        "-s",
        "danger-full-access",
        QUESTION,
    ]
    folder = work.parent / "home" / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(block("toml", "model_provider", stack))
    calls(stack, "exec_command", {"cmd": "ls"})
    run(stack, work, command)
    [session] = {request.session_id for request in stack.script.requests}
    assert session


def test_opencode(stack: Stack, work: Path) -> None:
    command = [program("opencode"), "run", QUESTION]
    (work / "opencode.json").write_text(block("json", "baseURL", stack))
    calls(stack, "bash", LISTING)
    run(stack, work, command)


def test_claude_code(stack: Stack, work: Path) -> None:
    command = [program("claude"), "-p", QUESTION, "--allowedTools", "Bash"]
    words = block("console", "ANTHROPIC_BASE_URL", stack).removeprefix("$ ").split()
    given = dict(word.split("=", 1) for word in words if "=" in word)
    calls(stack, "Bash", LISTING)
    run(stack, work, command, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", **given)
