"""A cluster of two Ray nodes on this machine, CPU workers, the bundled model; one node is killed."""

from __future__ import annotations

import httpx
import pytest
from cluster_rig import ENDLESS, SMALL, Service, leave, until
from ports import free_port
from ray_cluster import ray_nodes
from waiting import PATIENCE

# By `make faults`: beside other tests on two cores a replica may be silent for so long that it is given up.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 150
# of a replica: more than its half of the prompts
MOST = 6
PROMPTS = [
    f"{count} ships lay in the bay. It had rained all morning, and nobody knew when the boats would come home. "
    * 12
    for count in ("One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")
]
QUESTION = (
    "It rained. The secret number of the amber fox is 48213. The boats came home.\n\n"
    "What is the secret number of the amber fox?"
)


DOCUMENT = " ".join(f"On day {day} the boats brought {day * 7 % 41} baskets of fish." for day in range(90))


def test_a_node_dies_and_takes_its_own_streams_only() -> None:
    with ray_nodes(2) as nodes:
        port = free_port()
        out = nodes.carrel(
            *("deploy", "--port", str(port), "--grpc-port", "0", "--min-replicas", "2", "--cpus", "1"),
            *("--store-cpus", "1", "--max-requests", str(MOST), *SMALL),
        )
        assert f"http://127.0.0.1:{port}" in out
        service = Service(port)
        until(lambda: service.num_serving() == 2, "both replicas serve")
        assert service.answer(QUESTION) == "48213"
        # its account comes from the replica that was told to stop; a busy one may be too late with it
        until(lambda: "carrel" in service.usage("Once upon a time", stop=["a"]), "an account comes in time")

        follow(service)
        choose(service)

        undisturbed = service.run(PROMPTS, NUM_TOKENS)
        assert [stream.error for stream in undisturbed] == [""] * len(PROMPTS)

        # none ends before all are seen to run: replicas report every two seconds
        started = service.start(PROMPTS, ENDLESS)
        until(lambda: sum(service.running_by_replica()) == len(PROMPTS), "all run")
        shares = service.running_by_replica()
        assert min(shares) > 0
        nodes.tell("kill 1")
        # one may be given to the node while that dies, and begin there
        until(lambda: service.answer(QUESTION) == "48213", "a new request is served")
        both = [(stream, before.text) for (stream, _), before in zip(started, undisturbed, strict=True)]
        until(lambda: all(one.error or len(one.text) >= len(text) for one, text in both), "the others go on")
        streams = leave(started)
        assert {stream.error for stream in streams} == {"", "worker_unavailable"}
        assert sum(bool(stream.error) for stream in streams) in shares
        for stream, text in both:
            assert stream.text[: len(text)] == text[: len(stream.text)]

        # the dead node's conversations are computed elsewhere
        lost = [number for number, stream in enumerate(streams) if stream.error]
        again = service.run([PROMPTS[number] for number in lost], NUM_TOKENS)
        assert [stream.text for stream in again] == [undisturbed[number].text for number in lost]
        assert service.num_serving() == 1

        nodes.carrel("deploy", "--remove")
        assert not nodes.running("gpu_worker")
        assert not nodes.running("StoreActor")


def follow(service: Service) -> None:
    """A session whose replica is full is computed on the other node, with the same answer, and stays there."""

    def ask() -> tuple[str, int]:
        return service.completion(DOCUMENT, max_tokens=24, session_id="walk", ignore_eos=True)

    answer, cached = ask()
    assert cached == 0
    with service.busy([f"{number} boats" for number in range(MOST)], session_id="walk"):
        # what each runs is told every two seconds
        until(lambda: sum(service.running_by_replica()) == MOST, "all of the session run")
        assert sorted(service.running_by_replica()) == [0, MOST]
        assert ask() == (answer, 0)
    # where it is now, it stays
    again, cached = ask()
    assert (again, cached > len(DOCUMENT.split())) == (answer, True)
    assert service.metrics()['carrel_cluster_routed_requests_total{by="session"}'] == MOST + 1
    # both replicas have held it: a list has it once, and it is dropped everywhere
    [held] = httpx.get(f"{service.url}/v1/sessions", timeout=PATIENCE).json()["data"]
    assert (held["id"], held["tokens"]) == ("walk", cached)
    path = f"{service.url}/v1/sessions/walk"
    assert [httpx.delete(path, timeout=PATIENCE).status_code for _ in range(2)] == [200, 404]
    assert httpx.get(f"{service.url}/v1/sessions", timeout=PATIENCE).json()["data"] == []


def choose(service: Service) -> None:
    """The choices of one request go to replicas at once, as requests of their own do."""
    body = {"prompt": ["Once", "Twice"], "n": 2, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    for _ in range(3):
        reply = httpx.post(f"{service.url}/v1/completions", json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        texts = [choice["text"] for choice in reply.json()["choices"]]
        assert (texts[0], texts[2]) == (texts[1], texts[3])
    # none was given up on, and its replica with it
    assert service.num_serving() == 2
