"""Faults that take minutes with a real server, by `make faults`: who hangs for ever, and memory that forgets."""

from __future__ import annotations

import signal

import pytest
from serving import Serving, is_left, serving
from test_end_to_end import KV_HEADS, LAYERS
from test_recovery import QUESTION, answer, num_cached, readiness, until
from waiting import wait_until

from kv_store.client import Layout, RowFormat, StoreClient

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def flip_everywhere(server: Serving, slab_bytes: int) -> None:
    """A bit of every slab of the arena."""
    layout = Layout(LAYERS, KV_HEADS, RowFormat(64, "fp32"))
    target = f"unix:{server.run}/kv_store.sock"
    client = StoreClient.connect(target, layout, worker_id="other", transport="shm", max_gather_rows=1)
    client.arena.reshape(-1, slab_bytes)[:, 1001] ^= 16
    client.close()


def test_who_hangs_for_ever_is_started_again_and_flipped_bits_cost_time_only() -> None:
    options = ("--no-warmup", "--hang-timeout", "5", "--slab-bytes", "256KiB")
    with serving(*options, "--log-level", "info") as server:
        before = answer(server)
        assert answer(server) == before
        assert num_cached(server, "pqcache") > 0
        # an idle core has taken the sums long before a person could ask again
        wait_until(lambda: answer(server) == before and num_cached(server, "full") > 0)
        flip_everywhere(server, 256 << 10)
        assert answer(server) == before
        assert server.metrics()["carrel_worker_corrupt_segments_total"] > 0

        server.process.send_signal(signal.SIGSTOP)
        assert answer(server) == before
        server.process.send_signal(signal.SIGCONT)

        for name, process in (("gateway", server.child("gateway")), ("store", *server.actors("StoreActor"))):
            process.send_signal(signal.SIGSTOP)
            until(lambda process=process: not is_left(process), server)
            until(lambda: readiness(server) == 200, server)
            assert answer(server) == before
            assert f"{name} did not answer for" in server.log.read_text()

        log = server.log.read_text()
        # each line that a request leaves, and nothing of what it said
        assert "chat " in log
        assert not [line for line in QUESTION.text.splitlines() if len(line) > 20 and line in log]
        assert QUESTION.text[-40:] not in log
