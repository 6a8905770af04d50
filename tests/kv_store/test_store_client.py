"""The client against a store in this process: every transport, restarts, misuse."""

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from store_samples import LAYOUT, TOKENS, filled, keys_of, random_rows
from waiting import PATIENCE, wait_until

from carrel.process.log_lines import JSONLines
from carrel.process.trace_context import TraceContext
from kv_store.calls import CALL_BOUNDS, CallMeter
from kv_store.client import (
    InvalidStoreRequest,
    KMeansParams,
    Layout,
    NotInStore,
    PQParams,
    RowFormat,
    RowsWanted,
    StaleEpoch,
    StoreClient,
    StoreError,
    StoreFull,
    StoreUnreachable,
)
from kv_store.client.attachment import Lease
from kv_store.index import ArrayKeys, FitOptions, make_index
from kv_store.local import LocalStore

Connect = Callable[..., StoreClient]


TRANSPORTS = ("zero_copy", "shm", "grpc")


@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
def test_transports_carry_the_same_bytes(connect: Connect, element: str) -> None:
    layout = Layout(2, 2, RowFormat(24, element))  # 24: rows do not divide a slab evenly
    results = []
    for transport in TRANSPORTS:
        client = connect(f"w-{transport}", transport, layout)
        rows = filled(client, 150)
        assert client.transport == transport
        wanted = [
            RowsWanted("a", 1, np.array([149, 0, 31, 32, 33, 32])),
            RowsWanted("a", 0, np.arange(150)),
            RowsWanted("a", 0, np.array([], np.int64)),
        ]
        gathered = client.gather(1, wanted).copy()
        assert (gathered == np.concatenate([rows[1][[149, 0, 31, 32, 33, 32]], rows[0]])).all()
        if client.selects_in_store:
            assert (gathered == results[0][0]).all()
            continue
        pq = client.build_index("a", 0, 7, 140, PQParams(2, 4, 6), seed=5).result(PATIENCE)
        kmeans = client.build_index("a", 1, 40, 150, KMeansParams(8, "cosine", 6), seed=5).result(PATIENCE)
        by_product = client.build_index("a", 0, 7, 140, PQParams(2, 4, 6, "ip"), seed=5).result(PATIENCE)
        assert (pq.kind, kmeans.kind, by_product.kind) == ("pq", "kmeans", "pq")
        shapes = {name: array.shape for name, array in by_product.arrays.items()}
        assert shapes == {"codebooks": (2, 2, 16, 13), "codes": (2, 133, 2), "max_square_norms": (2, 2)}
        assert pq.arrays["codes"].shape == (2, 133, 2)
        assert pq.training_seconds > 0
        arrays = [np.array(array) for index in (pq, kmeans, by_product) for array in index.arrays.values()]
        results.append([gathered, *arrays])
        assert all(not array.flags.writeable for array in pq.arrays.values())
    for first, *others in zip(*results, strict=True):
        for other in others:
            assert first.dtype == other.dtype
            assert (first == other).all()


def test_a_fit_that_nothing_hides_has_the_fewest_iterations_over_half_of_the_points(connect: Connect) -> None:
    client = connect()
    keys = keys_of(LAYOUT, filled(client, 150))
    params, index = PQParams(2, 4), make_index(PQParams(2, 4))
    for seconds, most, num_points in ((0.0, 10, 0), (1e-9, 3, 75), (0.0, 10, 0)):
        built = client.build_index("a", 0, 0, 150, params, seed=5, prefill_seconds=seconds).result(PATIENCE)
        assert built.iterations == most
        # The same as a fit with so many points and iterations.
        fit = index.fit_head(ArrayKeys(keys[1]), FitOptions(most, 5, math.ceil(num_points / 16)))
        assert (built.arrays["codebooks"][1] == fit.arrays[0]).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_puts_of_any_stride_and_cut(connect: Connect, transport: str) -> None:
    client = connect(transport=transport)
    client.begin("a", 100)
    rows = random_rows(LAYOUT, 100)
    by_token = np.ascontiguousarray(rows.transpose(1, 0, 2)).transpose(1, 0, 2)
    for begin, end in ((0, 1), (1, 30), (30, 35), (35, 99), (99, 100), (30, 70)):
        client.put("a", 0, begin, by_token[:, begin:end])
    client.seal("a", 100, 0, 1)
    for head in range(2):
        assert (client.gather(0, [RowsWanted("a", head, np.arange(100))]) == rows[head]).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("layer", "begin", "count"),
    [(0, -1, 1), (0, 64, 1), (0, 63, 2), (0, 2**62, 1), (2, 0, 1), (-1, 0, 1), (0, 0, 0), (0, 31, 1)],
)
def test_a_put_outside_its_slabs_is_refused(
    connect: Connect, transport: str, layer: int, begin: int, count: int
) -> None:
    client = connect(transport=transport)
    rows = filled(client, 40)
    client.reserve("a", 64)
    with pytest.raises(InvalidStoreRequest):
        client.put("a", layer, begin, rows[:, :count])
    assert (client.gather(0, [RowsWanted("a", 0, np.arange(40))]) == rows[0]).all()


def test_rows_of_another_shape_are_refused(connect: Connect) -> None:
    client = connect()
    rows = filled(client, 40)
    for wrong in (rows[:1], rows[:, :, :-1], rows[0], rows.view(np.int8)):
        with pytest.raises(InvalidStoreRequest):
            client.put("a", 0, 40, wrong)
    with pytest.raises(NotInStore):
        client.put("b", 0, 0, rows)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("position", [40, 63, 64, -1, 2**31, 2**62, -(2**63)])
def test_a_gather_beyond_the_seal_is_refused(connect: Connect, transport: str, position: int) -> None:
    client = connect(transport=transport)
    rows = filled(client, 40)
    for layer, head, positions in ((0, 0, [0, position]), (0, 2, [0]), (7, 0, [0])):
        with pytest.raises(InvalidStoreRequest):
            client.gather(layer, [RowsWanted("a", head, np.array(positions, np.int64))])
    with pytest.raises(InvalidStoreRequest, match="max_gather_rows"):
        client.gather(0, [RowsWanted("a", 0, np.zeros(513, np.int64))])
    with pytest.raises(NotInStore):
        client.gather(0, [RowsWanted("b", 0, np.array([0]))])
    assert (client.gather(0, [RowsWanted("a", 1, np.array([39]))]) == rows[1, 39]).all()


@pytest.mark.parametrize(
    ("layer", "begin", "end", "params"),
    [
        (0, 0, 41, PQParams(2, 4)),
        (0, 40, 40, PQParams(2, 4)),
        (0, 20, 10, PQParams(2, 4)),
        (0, 0, 2**63, PQParams(2, 4)),
        (2, 0, 40, PQParams(2, 4)),
        (0, 0, 40, PQParams(2, 4, 2**31)),
    ],
)
def test_a_build_out_of_range_is_refused(
    connect: Connect, layer: int, begin: int, end: int, params: PQParams | KMeansParams
) -> None:
    client = connect()
    filled(client, 40)
    used = client.stats().reserved_bytes
    with pytest.raises(InvalidStoreRequest):
        client.build_index("a", layer, begin, end, params).result(PATIENCE)
    assert client.stats().reserved_bytes == used


def test_fields_that_no_message_can_carry_are_refused(connect: Connect) -> None:
    client = connect()
    filled(client, 40)
    for call in (
        lambda: client.reserve("a", -1),
        lambda: client.reserve("a", 2**63),
        lambda: client.seal("a", -1),
        lambda: client.build_index("a", 0, -1, 40, PQParams()),
        lambda: client.build_index("a", 0, 0, 40, KMeansParams(-1)),
        lambda: client.begin("", 0),
    ):
        with pytest.raises(InvalidStoreRequest):
            call()
    with pytest.raises(InvalidStoreRequest, match="metric 'dot' is none of"):
        client.build_index("a", 0, 0, 40, KMeansParams(4, "dot"))


class Alters(grpc.UnaryUnaryClientInterceptor):
    """Changes replies on their way."""

    def __init__(self, alter: Callable[[Any], object]) -> None:
        self._alter = alter

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        call = continuation(details, request)
        if details.method.endswith(("Begin", "BuildIndex")):
            self._alter(call.result())
        return call


def _put(reply: Any, slab: int) -> None:
    reply.slab_table[1] = slab


@pytest.mark.parametrize(
    "alter",
    [
        lambda reply: _put(reply, 256),
        lambda reply: _put(reply, 2**32 - 1),
        lambda reply: reply.slab_table.append(0),
        lambda reply: setattr(reply, "slabs_per_layer", 1),
        lambda reply: setattr(reply, "num_shared_tokens", 96),
    ],
    ids=["beyond", "huge", "longer", "shorter", "shared"],
)
def test_slabs_that_are_not_of_the_arena_are_refused(
    local_store: LocalStore, alter: Callable[[Any], object]
) -> None:
    client = StoreClient.connect(
        local_store.target, LAYOUT, worker_id="w", interceptors=[Alters(alter)], timeout_seconds=PATIENCE
    )
    with contextlib.closing(client):
        with pytest.raises(StoreError, match="reply"):
            client.begin("a", 2 * TOKENS)
        # Nothing of it is left there.
        assert client.stats().num_sequences == 0


@pytest.mark.parametrize("dtype", ["float64", "object", "none such"])
def test_an_index_that_is_not_what_its_reply_says_is_refused(local_store: LocalStore, dtype: str) -> None:
    def alter(reply: Any) -> None:
        for array in getattr(reply, "arrays", ()):
            array.dtype = dtype

    client = StoreClient.connect(
        local_store.target, LAYOUT, worker_id="w", interceptors=[Alters(alter)], timeout_seconds=PATIENCE
    )
    with contextlib.closing(client):
        filled(client, 64)
        with pytest.raises(StoreError, match=f"no {dtype}"):
            client.build_index("a", 0, 0, 64, PQParams(2, 4)).result(PATIENCE)


def test_a_full_store_says_so_and_release_gives_all_back(connect: Connect) -> None:
    client = connect()
    base = client.stats().reserved_bytes
    filled(client, 40)
    client.build_index("a", 0, 0, 40, PQParams(2, 4)).result(PATIENCE)
    with pytest.raises(StoreFull, match=r"\d+ bytes are missing") as full:
        client.begin("b", 32 * 256)
    assert f"{full.value.missing_bytes} bytes" in full.value.text
    # Fit for a user: neither where the store is nor what a sequence is called.
    assert "unix:" in str(full.value)
    assert "unix:" not in full.value.text
    assert "'b'" not in str(full.value)
    assert client.stats().index_bytes > 0
    client.end("a")
    assert (client.stats().reserved_bytes, client.stats().index_bytes) == (base, 0)


def test_what_fits_alone_is_known_without_asking(connect: Connect, local_store: LocalStore) -> None:
    client = connect(transport="zero_copy")
    client.begin("a", 0)
    most = 256 // LAYOUT.num_layers * client.tokens_per_slab
    assert client.missing_alone(most) == 0
    assert client.missing_alone(most + 1) == LAYOUT.num_layers * client.slab_bytes
    client.reserve("a", most)
    client.end("a")
    with pytest.raises(StoreFull) as full:
        client.begin("a", most + 1)
    assert full.value.missing_bytes == client.missing_alone(most + 1)
    # An index of one byte takes a slab.
    assert client.missing_alone(most, [(PQParams(1, 1), 1)]) == client.slab_bytes


def test_a_prefix_comes_back_with_its_bytes(connect: Connect) -> None:
    client = connect()
    rows = random_rows(LAYOUT, 70)
    hashes = [bytes([i]) * 32 for i in range(2)]
    client.begin("a", 70)
    for layer in range(2):
        client.put("a", layer, 0, rows)
    client.end("a", 70, hashes, "s")
    # Nobody has waited for the end.
    begun = client.begin("b", 1, [*hashes, b"x" * 32])
    assert (begun.num_shared, begun.slab_table.shape) == (64, (2, 2))
    assert client.stats().num_sessions == 1
    assert (client.gather(1, [RowsWanted("b", 1, np.arange(64))]) == rows[1, :64]).all()
    with pytest.raises(InvalidStoreRequest, match="immutable"):
        client.put("b", 0, 63, rows[:, :1])
    assert client.reserve("b", 65)[:, :2].tolist() == begun.slab_table.tolist()
    client.put("b", 0, 64, rows[:, 64:65])


def test_a_restarted_store_never_answers_for_the_old_one(local_store: LocalStore, connect: Connect) -> None:
    client = connect()
    rows = filled(client, 40)
    epoch = client.epoch
    local_store.restart()
    for _ in range(2):
        with pytest.raises((StaleEpoch, StoreUnreachable)):
            client.gather(0, [RowsWanted("a", 0, np.array([0]))])
    client_calls = (
        lambda: client.reserve("a", 80),
        lambda: client.seal("a", 40),
        lambda: client.build_index("a", 0, 0, 40, PQParams(2, 4)).result(PATIENCE),
    )
    for call in client_calls:
        with pytest.raises((StaleEpoch, StoreUnreachable)):
            call()
    client.reattach()
    assert client.epoch != epoch
    client.check()
    with pytest.raises(NotInStore):
        client.gather(0, [RowsWanted("a", 0, np.array([0]))])
    rows = filled(client, 40, seed=9)
    assert (client.gather(0, [RowsWanted("a", 0, np.arange(40))]) == rows[0]).all()


def test_a_lease_that_ran_out_or_was_lost_forbids_writing() -> None:
    beaten = threading.Event()

    def refuse() -> None:
        beaten.set()
        raise StaleEpoch("gone")

    lease = Lease(3.0, refuse)
    lease.check()
    assert beaten.wait(PATIENCE)
    lease.close()
    with pytest.raises(StaleEpoch):
        lease.check()

    def time_out() -> None:
        raise StoreUnreachable("silent")

    lease = Lease(0.05, time_out)
    time.sleep(0.2)
    with pytest.raises(StoreUnreachable):
        lease.check()
    lease.close()


def test_the_heartbeat_tells_whether_a_store_is_there_also_once_the_lease_is_lost() -> None:
    beaten = threading.Semaphore(0)
    answer: StaleEpoch | StoreUnreachable | None = None

    def beat() -> None:
        beaten.release()
        if answer is not None:
            raise answer

    def after_two_beats() -> tuple[bool, bool]:
        # the first may have begun before the answer changed; the second's outcome is noted when the third begins
        for _ in range(3):
            assert beaten.acquire(timeout=PATIENCE)
        try:
            lease.check()
        except StaleEpoch:
            return lease.is_answered, False
        return lease.is_answered, True

    lease = Lease(600.0, beat, beat_seconds=0.02)
    assert after_two_beats() == (True, True)
    answer = StoreUnreachable("silent")
    assert after_two_beats() == (False, True)
    answer = StaleEpoch("another start")
    assert after_two_beats() == (True, False)
    answer = StoreUnreachable("silent")
    assert after_two_beats() == (False, False)
    lease.close()


def test_a_client_without_a_store_knows_it_and_attaches_to_the_next(
    local_store: LocalStore, connect: Connect
) -> None:
    client = connect()
    filled(client, 40)
    assert client.is_answering
    local_store.server.close()
    with pytest.raises(StoreUnreachable):
        client.begin("b", 0)
    assert not client.is_answering
    client.unmap()
    assert client.arena.size == 0
    local_store.restart()
    wait_until(lambda: client.is_answering)
    client.reattach()
    filled(client, 40)


def test_a_heartbeat_keeps_a_quiet_client_alive() -> None:
    with LocalStore(256 * 4096, slab_bytes=4096, lease_seconds=3.0) as running:
        quiet = StoreClient.connect(running.target, LAYOUT, worker_id="quiet", max_gather_rows=8)
        gone = StoreClient.connect(running.target, LAYOUT, worker_id="gone", max_gather_rows=8)
        for client in (quiet, gone):
            client.begin("a", 32)
        gone.close()
        wait_until(lambda: quiet.stats().num_workers == 1)
        assert [sequence.worker_id for sequence in quiet.stats().sequences] == ["quiet"]
        quiet.check()
        quiet.close()


def test_leases_are_reaped_also_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [ValueError("inner"), ValueError("inner"), KeyError("inner")]
    with LocalStore(256 * 4096, slab_bytes=4096, lease_seconds=0.1) as running:
        store = running.server.store
        reap = store.reap

        def reap_at_last() -> int:
            # Attach does so too.
            if errors and threading.current_thread() is not threading.main_thread():
                raise errors.pop()
            return reap()

        monkeypatch.setattr(store, "reap", reap_at_last)
        store.attach("gone", LAYOUT, 8)
        wait_until(lambda: not store.stats().num_workers)
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 2


def test_a_heartbeat_goes_on_after_an_unexpected_error() -> None:
    errors: list[Exception] = [ValueError("inner")]
    failed = threading.Event()

    def beat() -> None:
        if errors:
            failed.set()
            raise errors.pop()

    lease = Lease(600.0, beat, beat_seconds=0.01)
    assert failed.wait(PATIENCE)
    # Nothing is known of the store until it answers again.
    wait_until(lambda: lease.is_answered)
    lease.check()
    errors += [ValueError("inner")] * 10_000
    wait_until(lambda: not lease.is_answered)
    lease.close()


def test_calls_are_timed_by_method_and_counted_by_how_they_ended(connect: Connect) -> None:
    client = connect(transport="grpc")
    filled(client, 40)
    with pytest.raises(StoreFull):
        client.begin("far too long", 1 << 30)
    client.gather(0, [RowsWanted("a", 0, np.arange(40))])
    stats = client.stats()
    # Of what the calls took, what the copies in the store did.
    assert sum(stats.times.gather.counts) == 1
    assert stats.times.gather.sum > 0
    calls = {each.method: each for each in stats.calls}
    assert calls["Begin"].codes == {"OK": 1, "RESOURCE_EXHAUSTED": 1}
    # streams too, either way
    assert calls["PutRows"].codes == {"OK": client.layout.num_layers}
    assert calls["GatherRows"].codes == {"OK": 1}
    assert sum(calls["Begin"].counts) == 2
    assert calls["Begin"].seconds > 0
    assert len(calls["Begin"].counts) == len(stats.call_bounds) + 1


def test_a_call_counts_where_its_time_lies() -> None:
    meter = CallMeter()
    for seconds in (0.0, CALL_BOUNDS[0], CALL_BOUNDS[0] * 1.01, 2 * CALL_BOUNDS[-1]):
        meter.add("Begin", seconds, "OK")
    (told,) = meter.read()
    assert told.counts == (2, 1, *[0] * (len(CALL_BOUNDS) - 2), 1)


def test_a_call_for_a_sequence_is_told_of_with_its_trace(
    local_store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.setFormatter(JSONLines("kv_store"))
    traces = {"a": TraceContext("a" * 32, "b" * 16)}
    with caplog.at_level(logging.DEBUG, "kv_store.calls"):
        client = StoreClient.connect(local_store.target, LAYOUT, worker_id="w", trace_of=traces.get)
        client.begin("a", 40)
        client.begin("b", 40)
        client.close()
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    begun = [line for line in lines if line["message"].startswith("Begin: OK in")]
    assert [(line["request_id"], line.get("trace_id")) for line in begun] == [("a", "a" * 32), ("b", None)]


def test_a_sequence_that_was_not_begun_leaves_nothing_in_its_client(connect: Connect) -> None:
    client = connect(transport="zero_copy")
    client.begin("big", 128 * TOKENS)
    for _ in range(2):
        begun = client.begin("copy", TOKENS, takes_less=True)
        assert begun.slab_table.shape == (LAYOUT.num_layers, 0)
        with pytest.raises(NotInStore, match="not open in this client"):
            client.reserve("copy", TOKENS)
    # One that asks for nothing is begun.
    client.begin("none", 0, takes_less=True)
    client.reserve("none", 0)
