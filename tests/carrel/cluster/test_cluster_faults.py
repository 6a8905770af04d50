"""Processes of a cluster are killed, each in turn, and the application is updated under load. Minutes: marked slow."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest
from cluster_rig import SMALL, Service, finish, until
from ports import free_port
from ray_cluster import Nodes, ray_nodes
from test_cluster_e2e import NUM_TOKENS, PROMPTS, QUESTION

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1800)]

REPLICA = "ServeReplica:carrel:Replica"
OURS = ("gpu_worker", "StoreActor", REPLICA)


def children(nodes: Nodes) -> set[psutil.Process]:
    return {process for word in OURS for process in nodes.running(word)}


def is_whole(nodes: Nodes, service: Service) -> Callable[[], bool]:
    """Return a condition: two replicas serve, and no earlier process of ours is left."""

    def check() -> bool:
        return [len(nodes.running(word)) for word in OURS] == [2, 2, 2] and service.num_serving() == 2

    return check


def test_each_process_in_turn_is_killed_and_an_update_loses_no_stream() -> None:
    with ray_nodes(2) as nodes:
        port = free_port()
        deploy = ("deploy", "--port", str(port), "--grpc-port", "0", "--min-replicas", "2", *SMALL)
        nodes.carrel(*deploy)
        service = Service(port)
        until(is_whole(nodes, service), "both replicas serve")
        undisturbed = service.run(PROMPTS, NUM_TOKENS)
        assert {stream.error for stream in undisturbed} == {""}

        for word in ("gpu_worker", REPLICA):
            started = service.start(PROMPTS, NUM_TOKENS)
            victim = nodes.running(word)[0]
            victim.kill()
            streams = finish(started)
            # both had some: where a prompt goes follows from where it was before
            assert {stream.error for stream in streams} == {"", "worker_unavailable"}, word
            for stream, before in zip(streams, undisturbed, strict=True):
                assert stream.error or stream.text == before.text
            until(is_whole(nodes, service), f"a {word} is replaced")
            assert service.answer(QUESTION) == "48213"

        epoch = nodes.running("StoreActor")
        epoch[0].kill()
        until(lambda: set(nodes.running("StoreActor")) != set(epoch), "the store is gone")
        until(is_whole(nodes, service), "the store is back")
        until(lambda: {each.error for each in service.run(PROMPTS, 8)} == {""}, "it is attached to")

        (gateway,) = nodes.running("ServeReplica:carrel:Gateway")
        before_update = children(nodes)
        gateway.kill()
        until(
            lambda: nodes.running("ServeReplica:carrel:Gateway") not in ([], [gateway]), "a gateway is back"
        )
        until(is_whole(nodes, service), "the gateway sees both")
        assert children(nodes) == before_update
        assert [each.text for each in service.run(PROMPTS, NUM_TOKENS)] == [each.text for each in undisturbed]

        started = service.start(PROMPTS, NUM_TOKENS)
        nodes.carrel(*deploy, "--max-requests", "2", "--shutdown-timeout", "120")
        streams = finish(started)
        assert [each.error for each in streams] == [""] * len(PROMPTS)
        assert [each.text for each in streams] == [each.text for each in undisturbed]
        until(is_whole(nodes, service), "only the new ones are left")
        assert not children(nodes) & before_update

        streams = service.run(PROMPTS, NUM_TOKENS)
        assert sorted(each.error for each in streams) == [""] * 4 + ["overloaded"] * 4
        assert service.answer(QUESTION) == "48213"

        nodes.carrel("deploy", "--remove")
        assert not children(nodes)
