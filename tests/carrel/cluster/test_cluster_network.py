"""A node of a cluster is cut off, then the head's host is lost: each node is a network namespace. Minutes: slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx
import pytest
from cluster_rig import SMALL, Service, finish, until
from figures import since, tell
from ray_network import Host, Network, can_make_networks, network
from test_cluster_e2e import NUM_TOKENS, PROMPTS, QUESTION
from waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not can_make_networks(), reason="needs the right to make network namespaces"),
]

PORT = 8000
GATEWAY = "ServeReplica:carrel:Gateway"
OURS = ("gpu_worker", "StoreActor", "ServeReplica:carrel:Replica")
# it is read from outside the head's namespace
DEPLOY = ("deploy", "--host", "0.0.0.0", "--port", str(PORT), "--grpc-port", "0", "--min-replicas", "2")
DEPLOY += ("--allow-open", "--allowed-hosts", "*", *SMALL)


class Watch(threading.Thread):
    """Short questions, one after another: the seconds of the longest time without an answer, and all errors."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self._service = service
        self._answered_at = time.monotonic()
        self.longest_s = 0.0
        self.errors: list[str] = []
        self._is_over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._is_over.is_set():
            try:
                found = self._service.answer("Hello.")
            except httpx.HTTPError as error:
                found = type(error).__name__
            if found in ("worker_unavailable", "overloaded", "ReadTimeout", "ConnectError", "ReadError"):
                self.errors.append(found)
                time.sleep(0.2)
                continue
            now = time.monotonic()
            self.longest_s, self._answered_at = max(self.longest_s, now - self._answered_at), now

    def end(self) -> dict[str, object]:
        self._is_over.set()
        self.join()
        return {
            "longest_s": round(self.longest_s, 1),
            "errors": sorted(set(self.errors)),
            "num": len(self.errors),
        }


def until_here(is_so: Callable[[], object], what: str, patience_s: float = 600.0) -> None:
    """Wait until the condition holds. Ray notices a failure late, so the patience is long."""
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.2)


def gateway_on(host: Host, others: tuple[Host, ...]) -> None:
    """Serve starts the gateway where it likes: again, until that is there."""
    for _ in range(10):
        until(lambda: any(each.running(GATEWAY) for each in (host, *others)), "a gateway runs")
        if host.running(GATEWAY):
            return
        for other in others:
            for process in (gone := other.running(GATEWAY)):
                process.kill()
            wait_until(lambda gone=gone: not any(each.is_running() for each in gone))
    raise AssertionError("Serve never started the gateway on the head")


def test_a_node_is_cut_off_and_the_heads_host_is_lost() -> None:
    with network(2) as net:
        head, other = net.hosts
        for host in net.hosts:
            net.start_ray(host)
        begin = time.monotonic()
        net.carrel(*DEPLOY)
        service = Service(PORT, head.address)
        until(lambda: service.num_serving() == 2, "both replicas serve")
        tell("deployed", seconds=since(begin))
        gateway_on(head, (other,))
        until(lambda: service.num_serving() == 2, "both replicas serve")
        undisturbed = service.run(PROMPTS, NUM_TOKENS)
        assert {stream.error for stream in undisturbed} == {""}

        started = service.start(PROMPTS, NUM_TOKENS)
        watch = Watch(service)
        cut_at = time.monotonic()
        other.cut()
        streams = finish(started)
        assert {stream.error for stream in streams} == {"", "worker_unavailable"}
        for stream, before in zip(streams, undisturbed, strict=True):
            assert stream.text == before.text if not stream.error else before.text.startswith(stream.text)
        ended = [stream.ended_at - cut_at for stream in streams if stream.error]
        assert service.answer(QUESTION) == "48213"
        # what is cut off ends by itself, once it knows that nobody will ask it again
        until_here(lambda: not any(other.running(word) for word in OURS), "nothing of ours is left there")
        tell(
            "a node cut off",
            streams_ended_after_s=[round(min(ended), 1), round(max(ended), 1)],
            num_ended=len(ended),
            nothing_left_after_s=since(cut_at),
            others=watch.end(),
        )

        other.join()
        other.kill()
        begin = time.monotonic()
        net.start_ray(other)
        until_here(lambda: service.num_serving() == 2, "a replica on the node that came back")
        tell("the node joined again", serving_after_s=since(begin))
        assert [each.text for each in service.run(PROMPTS, NUM_TOKENS)] == [each.text for each in undisturbed]

        update_under_load(net, service, [each.text for each in undisturbed])

        killed_at = time.monotonic()
        head.kill()
        with pytest.raises(httpx.TransportError):
            service.answer(QUESTION)
        until_here(lambda: not any(other.running(word) for word in OURS), "the other node gives up")
        tell("the head's host lost", nothing_left_after_s=since(killed_at))
        other.kill()
        begin = time.monotonic()
        for host in net.hosts:
            net.start_ray(host)
        net.carrel(*DEPLOY)
        until(lambda: service.num_serving() == 2, "both replicas serve")
        assert service.answer(QUESTION) == "48213"
        tell("a new head", serving_after_s=since(begin))


def update_under_load(net: Network, service: Service, expected: list[str]) -> None:
    """Streams that run go on to their end, and others are answered all the while."""
    watch, begin = Watch(service), time.monotonic()
    started = service.start(PROMPTS, NUM_TOKENS)
    net.carrel(*DEPLOY, "--shutdown-timeout", "120", "--max-requests", "16")
    streams = finish(started)
    assert [(each.text, each.error) for each in streams] == [(text, "") for text in expected]
    until(lambda: service.num_serving() == 2, "the new ones serve")
    tell("an update under load", seconds=since(begin), others=watch.end())
