"""Processes of a real server are stopped, each in turn: who is told what, who goes on, and what comes back."""

from __future__ import annotations

import re
import signal
import threading

import httpx
import openai
import psutil
import pytest
from questions import ask
from serving import NANO, Serving
from test_end_to_end import MANY, ORACLE, SLABS, answering
from test_recovery import answer, readiness, until
from tokenizers import Tokenizer
from waiting import PATIENCE

from carrel.cli import main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


class Stream(threading.Thread):
    """A stream that goes on until the server ends it: how many chunks have come, and the error at its end."""

    def __init__(self, server: Serving, policy: str) -> None:
        super().__init__(daemon=True)
        self.num_chunks = 0
        self.error: openai.APIError | None = None
        self._chunks = server.stream(ask(300, seed=9).text, 30000, policy=policy, budget=0.5)
        self.start()

    def run(self) -> None:
        try:
            for _ in self._chunks:
                self.num_chunks += 1
        except openai.APIError as error:
            self.error = error

    def goes_on(self, server: Serving) -> None:
        told = self.num_chunks
        until(lambda: self.num_chunks > told + 20, server)


def refusal(server: Serving, policy: str) -> tuple[int, str]:
    """The status and the code of an answer that is an error."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "carrel": {"policy": policy}}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    return reply.status_code, reply.json()["error"]["code"]


def check_prompts_are_not_told(log: str) -> None:
    """Check that the log has lines at debug level, and that none holds words or token ids of a prompt."""
    assert '"level": "DEBUG"' in log
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    for case in MANY:
        text = case.question.text
        ids = tokenizer.encode(text).ids
        parts = [text[at : at + 40] for at in range(0, len(text) - 40, 400)]
        parts += [", ".join(map(str, ids[at : at + 4])) for at in range(0, len(ids) - 4, 100)]
        assert not [part for part in parts if part in log]


def chat(server: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    """A question by `carrel chat`, which tells what the answer cost."""
    options = ("--policy", "pqcache", "--budget", "0.1", "--max-tokens", "16", "--temperature", "0")
    assert main(["chat", "--url", server.url, "--question", ORACLE.question.text, *options]) == 0
    told, cost = capsys.readouterr()
    assert told.strip().rstrip(".") == ORACLE.question.answer
    assert re.search(r"tokens\s+attended\s+\(\d+%,\s+pqcache\)", cost)


def test_by_zero_copy_and_a_chat_and_a_stopped_store_holds_up_nobody_else_and_a_stopped_worker_is_started_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = (*SLABS, "--no-warmup", "--hang-timeout", "10", "--log-level", "debug")
    with answering(MANY, "--transport", "zero_copy", *options) as server:
        assert server.run.stat().st_mode & 0o777 == 0o700
        # Ray's processes, too
        assert server.listening() <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        chat(server, capsys)
        before = answer(server)
        dense, recalls = Stream(server, "full"), Stream(server, "pqcache")
        dense.goes_on(server)
        recalls.goes_on(server)

        [actor] = server.actors("StoreActor")
        actor.send_signal(signal.SIGSTOP)
        until(lambda: readiness(server) == 503, server)
        # on a busy machine a status that is late says for a moment that the worker is away
        until(lambda: refusal(server, "pqcache") == (503, "store_unavailable"), server)
        listed = httpx.get(f"{server.url}/v1/sessions", timeout=PATIENCE)
        assert (listed.status_code, listed.json()["error"]["code"]) == (503, "store_unavailable")
        dense.goes_on(server)
        # it needs nothing of the store for now
        assert recalls.error is None
        actor.send_signal(signal.SIGCONT)
        until(lambda: readiness(server) == 200, server)
        dense.goes_on(server)
        recalls.goes_on(server)
        assert answer(server) == before

        worker = server.child("gpu_worker")
        worker.send_signal(signal.SIGSTOP)
        assert refusal(server, "full") == (503, "worker_unavailable")
        assert readiness(server) == 503
        until(lambda: not psutil.pid_exists(worker.pid), server)
        for stream in (dense, recalls):
            stream.join(PATIENCE)
            assert stream.error is not None
        until(lambda: readiness(server) == 200, server)
        assert answer(server) == before
        log = server.log.read_text()
        assert "worker did not answer for 10 s and was killed" in log
        check_prompts_are_not_told(log)
