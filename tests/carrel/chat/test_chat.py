"""`carrel chat` as its user sees it, against a small HTTP server."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from commands import Command, Ended
from fake_server import FakeServer
from rich.console import Console
from waiting import PATIENCE

from carrel.chat.answer import cost_line, take_answer
from carrel.chat.client import ChatClient
from carrel.chat.conversation import ChatOptions, Conversation, Delta, Usage
from carrel.chat.repl import Repl

ROOT = Path(__file__).resolve().parents[3]
NO_URLS = ("127.0.0.1:8000", "localhost:8000", "ftp://127.0.0.1", "http://127.0.0.1:x")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer().running() as fake:
        yield fake


@pytest.fixture
def chat(server: FakeServer, carrel: Command) -> Callable[..., Ended]:
    return partial(carrel, "chat", "--url", server.url)


def test_one_question(server: FakeServer, chat: Callable[..., Ended], tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark night.")
    options = ["--policy", "pqcache", "--budget", "0.1", "--system", "Be brief.", "--max-tokens", "9"]
    ended = chat("--file", book, "--question", "What night?", "--temperature", "0", *options)
    assert (ended.code, ended.out) == (0, "Forty-two.\n")
    cost = " ".join(ended.err.split())
    assert "3,000 of 30,003 tokens attended (10%, pqcache)" in cost
    assert "27,000 offloaded · 1.5 MB moved · hit rate 91%" in cost
    assert re.search(r"TTFT [\d,]+ ms · [\d,.]+ tok/s", cost)
    (request,) = server.requests
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "It was a dark night.\n\nWhat night?"},
    ]
    assert request["carrel"] == {"policy": "pqcache", "budget": 0.1}
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("carrel-nano", 9, 0.0)
    assert request["stream"] is True
    assert request["stream_options"] == {"include_usage": True}


def test_the_question_may_come_on_stdin(
    server: FakeServer, chat: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What night?\n"))
    assert chat("--budget", "2048").out == "Forty-two.\n"
    assert server.requests[0]["messages"] == [{"role": "user", "content": "What night?"}]
    assert server.requests[0]["carrel"] == {"budget": 2048}


def talk(server: FakeServer, lines: list[str], document: str | None = None) -> str:
    """Return the output that a user sees who types `lines`."""
    remaining = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    return converse(server, read, document)


def converse(server: FakeServer, read: Callable[[str], str], document: str | None = None) -> str:
    """Return the output of a chat whose input lines come from `read`."""
    output = Console(file=io.StringIO(), width=200)
    with closing(ChatClient(f"{server.url}/v1/")) as client:
        Repl(client, client.model(), Conversation(None, document), ChatOptions(), output, output).run(read)
    return str(output.file.getvalue())  # type: ignore[attr-defined]


def test_later_turns_keep_the_conversation(server: FakeServer) -> None:
    talk(server, ["first?", "second?", "/reset", "third?", "/quit", "never?"], document="Book.")
    asked = [[message["content"] for message in request["messages"]] for request in server.requests]
    assert asked == [
        ["Book.\n\nfirst?"],
        ["Book.\n\nfirst?", "Forty-two.", "second?"],
        ["Book.\n\nthird?"],
    ]


def test_a_file_may_be_opened_on_the_way(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "new book.txt").write_text("New.")
    seen = talk(server, [f"/file {tmp_path}/new book.txt", "first?", "/file /none", "second?", "/what"])
    assert "4 characters" in seen
    assert "cannot read /none" in seen
    assert "/reset" in seen
    assert server.requests[0]["messages"][0]["content"] == "New.\n\nfirst?"
    assert server.requests[1]["messages"][2]["content"] == "second?"


def test_a_refused_question_is_shown_and_forgotten(server: FakeServer) -> None:
    server.status = 400
    server.error = {"message": "40000 tokens exceed 32768", "code": "context_length_exceeded"}
    seen = talk(server, ["first?"])
    assert "40000 tokens exceed 32768" in seen
    assert "--file" in seen
    server.status = 200
    talk(server, ["second?"])
    assert len(server.requests[1]["messages"]) == 1


def test_an_answer_that_is_stopped_before_its_first_token_tells_no_time_of_that() -> None:
    def events() -> Iterator[Delta | Usage]:
        raise KeyboardInterrupt
        yield Delta("")

    assert cost_line(take_answer(events(), print)) == "stopped"


@pytest.mark.parametrize(
    ("attended", "text"),
    [
        # dense: 20 steps over 101 to 120 tokens, or, as the last one is not computed, 19
        (110.5, "121 tokens, all attended (bitkeys)"),
        (110.0, "121 tokens, all attended (bitkeys)"),
        # 95 tokens of the prompt are kept, and all of the answer
        (105.5, "106 of 121 tokens attended (87%, bitkeys)"),
    ],
)
def test_all_attended_is_said_in_words(attended: float, text: str) -> None:
    usage = Usage(100, 21, "bitkeys", context_tokens=121, attended_tokens=attended)
    assert cost_line(take_answer(iter([usage]), print)).startswith(text)


def test_an_error_within_the_stream_is_an_error(server: FakeServer, carrel: Command) -> None:
    server.late_error = "the worker is gone"
    assert "the worker is gone" in carrel.refusal("chat", "--url", server.url, "--question", "What?", code=1)


def test_no_server(carrel: Command) -> None:
    error = carrel.refusal("chat", "--url", "http://127.0.0.1:1", "--question", "What?", code=1)
    assert "no server at http://127.0.0.1:1" in error
    assert "carrel serve" in error


def test_keys(server: FakeServer, chat: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    server.api_key = "tell-nobody"
    refused = chat("--question", "What?")
    assert (refused.code, "--api-key" in refused.err) == (1, True)
    assert chat("--question", "What?", "--api-key", "tell-nobody").code == 0
    monkeypatch.setenv("CARREL_API_KEY", "tell-nobody")
    assert chat("--question", "What?").code == 0


@pytest.mark.parametrize("key", ["k\u00e9y", "secret\n", "secret key"])
def test_a_key_that_is_none_is_refused_and_not_shown(
    chat: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    by_option = chat("--question", "What?", "--api-key", key)
    monkeypatch.setenv("CARREL_API_KEY", key)
    for refused in (by_option, chat("--question", "What?")):
        assert refused.code == 2
        assert "CARREL_API_KEY" in refused.err
        assert key.strip() not in refused.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"--url": url}, "http://127.0.0.1:8000") for url in NO_URLS),
        *(
            ({"--temperature": text}, f"--temperature: '{text}' is no number")
            for text in ("nan", "inf", "warm")
        ),
        ({"--question": " "}, "error:"),
        ({"--system": "caf\udce9"}, "the system message is not UTF-8 text"),
        ({"--file": "none"}, "cannot read"),
        ({"--file": "latin"}, "not UTF-8"),
        ({"--file": "binary"}, "binary"),
        ({"--file": "empty"}, "empty"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    server: FakeServer,
    carrel: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changes: dict[str, str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("latin", b"\xff\xfe\x00"), ("binary", b"a\0b"), ("empty", b"\n")):
        (tmp_path / name).write_bytes(content)
    given = {"--url": server.url, "--question": "What?", **changes}
    error = carrel.refusal("chat", *(word for each in given.items() for word in each))
    assert message in error
    assert "--url" not in changes or f"--url {changes['--url']} " in error
    assert not server.requests


# how Python reads stdin in most languages, and in the language C
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_question_on_stdin_that_is_no_text_is_refused(
    server: FakeServer, carrel: Command, monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9?"), "utf-8", errors))
    assert "the question is not UTF-8 text" in carrel.refusal("chat", "--url", server.url)
    assert not server.requests


def test_what_is_typed_that_is_no_text_is_refused_and_the_conversation_goes_on(server: FakeServer) -> None:
    lines = iter(["caf\udce9?", b"caf\xe9?", "What night?", "/quit"])

    def read(prompt: str) -> str:
        line = next(lines)
        return line if isinstance(line, str) else line.decode()

    seen = converse(server, read)
    assert seen.count("the question is not UTF-8 text") == 2
    assert "Forty-two." in seen
    assert [request["messages"][0]["content"] for request in server.requests] == ["What night?"]


@pytest.mark.parametrize("inherited", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(
    server: FakeServer, inherited: signal.Handlers
) -> None:
    server.is_endless = True
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "carrel", "chat", "--url", server.url],
        cwd=ROOT,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, inherited),
    )
    os.close(inside)
    try:
        read_until(terminal, "Ctrl-C")
        os.write(terminal, b"first?\n")
        read_until(terminal, "more more")
        process.send_signal(signal.SIGINT)
        read_until(terminal, "stopped")
        assert server.disconnected.wait(PATIENCE), "the request was not closed"
        server.is_endless = False
        os.write(terminal, b"second?\n")
        read_until(terminal, "hit rate")
        os.write(terminal, b"/quit\n")
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def read_until(terminal: int, text: str) -> str:
    seen = ""
    deadline = time.monotonic() + PATIENCE
    while text not in seen:
        assert time.monotonic() < deadline, seen
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen
