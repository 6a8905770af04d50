"""The three real processes on a CPU: right answers, exact bytes, nothing left behind."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import openai
import pytest
from doors import check_doors
from operating import LAYERS, check_indexes, check_operating
from questions import Question, ask
from serving import ROOT, Serving, is_left, serving
from structure import check_kinds, check_structure, check_tools
from waiting import PATIENCE, wait_until

from gateway.v1 import chat_pb2

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# of 1024 tokens of a layer: some prompts have more than one
SLABS = ("--slab-bytes", "1MiB")
# of a server that starts none of its processes again
ENDS_WITH_ANY = ("--restarts", "0")
KV_HEADS, ROW_BYTES = 2, 2 * 64 * 4
MAX_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """One request of the mix: where it goes, how, and what must come back."""

    endpoint: str
    policy: str
    budget: float
    question: Question


@dataclass(frozen=True)
class Reply:
    """carrel: the request's own figures, by REST or gRPC."""

    text: str
    prompt_tokens: int
    carrel: Any

    @property
    def policy(self) -> str:
        return str(self.carrel.policy)


ORACLE = Case("rest-stream", "oracle", 0.1, ask(900, seed=5))
# One of each policy and endpoint; the oracle's index is on the device only.
SELECTED_BY_THE_STORE = [
    Case("rest-stream", "bitkeys", 0.2, ask(800, seed=3)),
    Case("grpc", "clusterkv", 0.1, ask(1300, seed=3)),
    Case("rest", "full", 1.0, ask(700, seed=3)),
]
FEW = [*SELECTED_BY_THE_STORE, ORACLE]
# The store trains their indexes.
TRAINED = [
    Case("rest", "clusterkv", 0.2, ask(900, seed=3)),
    Case("grpc", "pqcache", 0.1, ask(1500, seed=4)),
]
# The policies that recall by another endpoint too.
MANY = [*FEW, *TRAINED]


class StoreWatch:
    """Polls the store while requests run and keeps each sequence's greatest held bytes by its token count."""

    def __init__(self, server: Serving) -> None:
        self._server = server
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.held_bytes: dict[str, tuple[int, int]] = {}
        self.totals_agree = True

    def _run(self) -> None:
        while not self._done.wait(0.05):
            stats = self._server.store_stats()
            self.totals_agree &= stats.held_bytes == sum(entry.held_bytes for entry in stats.sequences)
            for entry in stats.sequences:
                if entry.num_tokens:
                    self.held_bytes[entry.sequence_id] = (entry.num_tokens, entry.held_bytes)

    @property
    def seen_tokens(self) -> set[int]:
        return {tokens for tokens, _ in list(self.held_bytes.values())}

    def __enter__(self) -> StoreWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def send(server: Serving, case: Case) -> Reply:
    return send_grpc(server, case) if case.endpoint == "grpc" else send_rest(server, case)


def send_rest(server: Serving, case: Case) -> Reply:
    client = server.openai()
    arguments = {
        "model": "carrel-nano",
        "messages": [{"role": "user", "content": case.question.text}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "extra_body": {"carrel": {"policy": case.policy, "budget": case.budget}},
    }
    if case.endpoint == "rest":
        reply = client.chat.completions.create(**arguments)
        text, usage = reply.choices[0].message.content, reply.usage
    else:
        text = ""
        usage = None
        for chunk in client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        ):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
    return Reply(text, usage.prompt_tokens, SimpleNamespace(**usage.model_extra["carrel"]))


def send_grpc(server: Serving, case: Case) -> Reply:
    request = chat_pb2.ChatRequest(
        messages=[chat_pb2.Message(role="user", content=case.question.text)],
        max_tokens=MAX_TOKENS,
        temperature=0,
        carrel=chat_pb2.CarrelOptions(policy=case.policy, budget_share=case.budget),
    )
    text, usage = "", None
    with grpc.insecure_channel(server.grpc_target) as channel:
        for event in server.chat_stub(channel).Complete(request, timeout=600):
            text += event.delta.content
            if event.HasField("complete"):
                usage = event.complete.usage
    return Reply(text, usage.prompt_tokens, usage.carrel)


def send_all(server: Serving, cases: list[Case]) -> list[Reply]:
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda case: send(server, case), cases))


def wait_empty(server: Serving) -> None:
    """Everything that requests held is free again; what an attached worker keeps is its response segment."""

    def is_empty() -> bool:
        store, worker = server.store_stats(), server.worker_stats()
        left = (store.held_bytes, store.num_sequences, store.num_indexes, store.index_bytes)
        return not any(left) and not (worker.slot_used_tokens or worker.running or worker.waiting)

    wait_until(
        is_empty, lambda: f"for an empty store: {server.store_stats()} {server.worker_stats()}", poll=0.1
    )


def check_replies(cases: list[Case], replies: list[Reply]) -> None:
    for case, reply in zip(cases, replies, strict=True):
        assert reply.text.strip().rstrip(".") == case.question.answer, case
        assert reply.policy == case.policy
        if case.policy == "full":
            assert reply.carrel.offloaded_tokens == 0
            continue
        assert reply.carrel.budget_tokens == int(case.budget * reply.prompt_tokens)
        assert reply.carrel.attended_tokens == pytest.approx(reply.carrel.budget_tokens, abs=1e-6), case
        # the last token is sampled, never computed with
        assert 0 <= reply.carrel.offloaded_tokens - reply.prompt_tokens <= MAX_TOKENS


def check_held(watch: StoreWatch, replies: list[Reply]) -> None:
    assert watch.seen_tokens == {reply.prompt_tokens for reply in replies if reply.policy != "full"}
    for tokens, held in watch.held_bytes.values():
        assert held == tokens * LAYERS * KV_HEADS * ROW_BYTES
    assert watch.totals_agree


@contextmanager
def answering(cases: list[Case], *options: str, arena: str = "1GiB") -> Iterator[Serving]:
    """A server where nothing is kept for prompts that begin alike; it answers the requests by REST and gRPC at once,
    with exact bytes and budgets, and its store is empty then."""
    with serving("--prefix-cache", "off", *options, arena=arena) as server:
        # the end of the warm-up's last request may still be on its way to the store
        wait_empty(server)
        baseline = server.store_stats().reserved_bytes
        with StoreWatch(server) as watch:
            replies = send_all(server, cases)
            for case, reply in zip(cases, replies, strict=True):
                # on a busy machine a short answer may end between two polls
                for _ in range(20):
                    if reply.policy == "full" or reply.prompt_tokens in watch.seen_tokens:
                        break
                    send(server, case)
        check_replies(cases, replies)
        check_held(watch, replies)
        wait_empty(server)
        assert server.store_stats().reserved_bytes == baseline
        yield server


def options_of_readme() -> list[str]:
    """Return the options of the README's command for the papers' machinery, as make passes them on."""
    text = (ROOT / "README.md").read_text()
    [line] = re.findall(r'^\$ make serve ARGS="(.+--transport[^"]+)"', text, re.MULTILINE)
    return shlex.split(line)


def test_by_the_stores_selection_and_a_killed_supervisor_takes_its_processes_along() -> None:
    options = (*options_of_readme(), *SLABS, *ENDS_WITH_ANY, "--no-warmup")
    with answering(SELECTED_BY_THE_STORE, *options) as server:
        with pytest.raises(openai.BadRequestError, match=r"'oracle'.*--transport zero_copy"):
            send(server, ORACLE)
        check_structure(server)
        check_tools(server)
        check_kinds(server)
        check_doors(server)
        for case in TRAINED:
            check_indexes(server, partial(send, server, case), by_store=True)
        check_operating(server, SELECTED_BY_THE_STORE[0].question.text)
        children = server.descendants()
        # Ray's, too, of which some would try for a minute to tell of its end
        assert len(children) > 3
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(map(is_left, children)), lambda: f"for {children}", poll=0.2)


# A slab of 256 KiB holds 256 tokens of a layer: 45 MiB hold four such prompts and their indexes, but not what they grow
# to.
SLAB_BYTES, SMALL_ARENA = "256KiB", "45MiB"
GROWING = [[10 * number + place % 7 for place in range(1010)] for number in range(1, 5)]


def completed(server: Serving, prompt: list[int]) -> str:
    client = server.openai()
    reply = client.completions.create(
        model="carrel-nano",
        prompt=prompt,
        max_tokens=40,
        temperature=0,
        extra_body={"ignore_eos": True, "carrel": {"policy": "pqcache", "budget": 0.3}},
    )
    assert reply.usage.completion_tokens == 40
    return reply.choices[0].text


def check_full_arena(server: Serving) -> None:
    """Check that a preempted request continues with the same tokens.

    A request that never fits, even alone, is refused before it starts, and the error names nothing of the inside.
    """
    alone = [completed(server, prompt) for prompt in GROWING]
    before = server.worker_stats().preemptions_total
    with ThreadPoolExecutor(len(GROWING)) as pool:
        assert list(pool.map(lambda prompt: completed(server, prompt), GROWING)) == alone
    assert server.worker_stats().preemptions_total > before
    with pytest.raises(openai.APIStatusError, match="--arena-bytes") as refused:
        completed(server, [7] * 4000)
    for inside in ("/tmp", ".sock", "cmpl-", "sequence"):
        assert inside not in str(refused.value.body)


def test_by_shared_memory_and_a_client_that_goes_away_frees_everything_and_a_full_arena_and_a_killed_store() -> (
    None
):
    options = ("--transport", "shm", "--slab-bytes", SLAB_BYTES, *ENDS_WITH_ANY)
    with answering(FEW, *options, arena=SMALL_ARENA) as server:
        for case in TRAINED:
            check_indexes(server, partial(send, server, case), by_store=False)
        going = server.stream(ORACLE.question.text, 4000, policy="pqcache", budget=0.1)
        assert server.store_stats().num_sequences == 1
        going.close()
        wait_empty(server)
        assert server.worker_stats().requests_aborted_total == 1
        check_full_arena(server)

        lost = server.stream(ORACLE.question.text, 4000, policy="pqcache", budget=0.1)
        [actor] = server.actors("StoreActor")
        actor.kill()
        with pytest.raises((openai.APIError, openai.APIConnectionError)):
            for _ in lost:
                pass
        assert server.process.wait(PATIENCE) != 0
        assert "store" in server.log.read_text()
