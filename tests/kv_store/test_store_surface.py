"""The gRPC surface as any client sees it: health, reflection, statuses, hostile messages."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from store_samples import LAYOUT, filled
from waiting import PATIENCE

from kv_store.client import (
    BitParams,
    IndexParams,
    InvalidStoreRequest,
    KMeansParams,
    NotInStore,
    PQParams,
    StoreClient,
    wire,
)
from kv_store.client.wire import own_edition
from kv_store.local import LocalStore
from kv_store.trainers.task import TrainerPool, TrainOutcome, TrainTask
from kv_store.v1 import kv_store_pb2 as pb
from kv_store.v1 import kv_store_pb2_grpc

EDITION = wire.edition_to_message(own_edition())
SERVICE = "carrel.kv_store.v1.KVStore"


@pytest.fixture
def channel(local_store: LocalStore) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(local_store.target) as opened:
        yield opened


def attach(stub: kv_store_pb2_grpc.KVStoreStub, worker_id: str = "w", rows: int = 8) -> pb.AttachResponse:
    layout = wire.layout_to_message(LAYOUT)
    request = pb.AttachRequest(worker_id=worker_id, layout=layout, max_gather_rows=rows, edition=EDITION)
    return stub.Attach(request, timeout=PATIENCE)


def status_of(call: Callable[..., Any], request: object) -> tuple[grpc.StatusCode, str]:
    # A stream fails when it is read, a single reply when it is asked for.
    with pytest.raises(grpc.RpcError) as caught:
        list(call(request, timeout=PATIENCE))
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_says_serving(channel: grpc.Channel, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_service(channel: grpc.Channel) -> None:
    names = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {SERVICE, "grpc.health.v1.Health"} <= set(names)


def test_sockets_are_for_their_owner_only(local_store: LocalStore) -> None:
    path = local_store.target.removeprefix("unix:")
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(path)).st_mode & 0o077 == 0


def test_errors_have_their_status_and_no_traceback(channel: grpc.Channel) -> None:
    stub = kv_store_pb2_grpc.KVStoreStub(channel)
    epoch = attach(stub).epoch
    stub.Begin(pb.BeginRequest(epoch=epoch, worker_id="w", sequence_id="a"), timeout=PATIENCE)
    reserve = lambda **fields: pb.ReserveRequest(worker_id="w", sequence_id="a", **fields)  # noqa: E731
    gather = lambda *positions: pb.GatherRequest(  # noqa: E731
        epoch=epoch, worker_id="w", items=[pb.GatherItem(sequence_id="a", positions=positions)]
    )
    bad_layout = pb.Layout(version=9, num_layers=1, num_kv_heads=1, head_dim=1, row_type=1)
    bad_type = pb.Layout(version=1, num_layers=1, num_kv_heads=1, head_dim=1, row_type=77)
    huge = wire.layout_to_message(LAYOUT)
    cases = [
        (stub.Attach, pb.AttachRequest(edition=EDITION), grpc.StatusCode.INVALID_ARGUMENT),
        (
            stub.Attach,
            pb.AttachRequest(edition=EDITION, worker_id="v", layout=bad_layout),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            stub.Attach,
            pb.AttachRequest(edition=EDITION, worker_id="v", layout=bad_type),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            stub.Attach,
            pb.AttachRequest(edition=EDITION, worker_id="v", layout=huge, max_gather_rows=2**64 - 1),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ),
        (stub.Reserve, reserve(epoch=epoch + 1), grpc.StatusCode.FAILED_PRECONDITION),
        (stub.Reserve, reserve(epoch=epoch, num_tokens=2**64 - 1), grpc.StatusCode.INVALID_ARGUMENT),
        (stub.Reserve, reserve(epoch=epoch, num_tokens=2**40), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (stub.Gather, gather(2**64 - 1), grpc.StatusCode.INVALID_ARGUMENT),
        (stub.Gather, gather(2**63), grpc.StatusCode.INVALID_ARGUMENT),
        (stub.GatherRows, gather(2**63), grpc.StatusCode.INVALID_ARGUMENT),
        (
            stub.BuildIndex,
            pb.BuildIndexRequest(epoch=epoch, worker_id="w", sequence_id="a", token_end=1),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            stub.TopK,
            pb.TopKRequest(epoch=epoch, worker_id="w", items=[pb.TopKItem(sequence_id="b")]),
            grpc.StatusCode.NOT_FOUND,
        ),
        (stub.PutRows, iter(()), grpc.StatusCode.INVALID_ARGUMENT),
    ]
    for call, request, expected in cases:
        status, details = status_of(call, request)
        assert status == expected, details
        assert details
        assert "Traceback" not in details
        assert ".py" not in details
    stub.Heartbeat(pb.HeartbeatRequest(epoch=epoch, worker_id="w"), timeout=PATIENCE)


def test_random_bytes_in_every_method_leave_the_store_alive(channel: grpc.Channel) -> None:
    rng = np.random.default_rng(0)
    stub = kv_store_pb2_grpc.KVStoreStub(channel)
    epoch = attach(stub).epoch
    for method in pb.DESCRIPTOR.services_by_name["KVStore"].methods:
        raw = channel.stream_stream(f"/{SERVICE}/{method.name}")
        for length in (1, 10, 100):
            with pytest.raises(grpc.RpcError) as caught:
                list(raw(iter([rng.bytes(length)]), timeout=PATIENCE))
            assert caught.value.code() in {
                grpc.StatusCode.INTERNAL,  # gRPC's own answer to bytes that are no message
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.UNIMPLEMENTED,  # another edition
                grpc.StatusCode.UNKNOWN,
            }, method.name
            assert "Traceback" not in caught.value.details()
    stub.Heartbeat(pb.HeartbeatRequest(epoch=epoch, worker_id="w"), timeout=PATIENCE)


def test_a_message_beyond_the_bound_is_refused(channel: grpc.Channel) -> None:
    stub = kv_store_pb2_grpc.KVStoreStub(channel)
    status, _ = status_of(stub.Heartbeat, pb.HeartbeatRequest(worker_id="x" * (17 << 20)))
    assert status == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_unexpected_error_is_hidden(
    local_store: LocalStore, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode() -> None:
        raise ZeroDivisionError("secret inside")

    monkeypatch.setattr(local_store.server.store, "stats", explode)
    status, details = status_of(kv_store_pb2_grpc.KVStoreStub(channel).Stats, pb.StatsRequest())
    assert status == grpc.StatusCode.INTERNAL
    assert "secret" not in details


class StuckTrainers(TrainerPool):
    """Finishes nothing until told."""

    def __init__(self) -> None:
        self.futures: list[Future[TrainOutcome]] = []
        self.heads: list[tuple[int, int]] = []
        self.asked = threading.Event()

    def submit(self, task: TrainTask) -> Future[TrainOutcome]:
        future: Future[TrainOutcome] = Future()
        self.futures.append(future)
        self.heads.append(task.heads)
        self.asked.set()
        return future

    def close(self) -> None:
        for future in self.futures:
            future.cancel()


def test_a_build_whose_time_is_no_number_leaves_no_slab(connect: Callable[..., StoreClient]) -> None:
    client = connect()
    base = client.stats().reserved_bytes
    filled(client, 40)
    client.build_index("a", 0, 0, 40, PQParams(2, 4)).result(PATIENCE)
    for seconds in (float("nan"), float("inf"), -1.0):
        error = client.build_index("a", 0, 0, 40, PQParams(2, 4), prefill_seconds=seconds).exception(10.0)
        assert isinstance(error, InvalidStoreRequest)
    client.end("a")
    assert client.stats().reserved_bytes == base


def test_builds_block_nobody_and_a_released_sequence_gets_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = StuckTrainers()
    monkeypatch.setattr("kv_store.server.make_trainers", lambda *arguments: trainers)
    with LocalStore(256 * 4096, slab_bytes=4096) as running:
        client = StoreClient.connect(running.target, LAYOUT, worker_id="w", max_gather_rows=8)
        base = client.stats().reserved_bytes
        filled(client, 40)
        begun = client.build_index("a", 0, 0, 40, PQParams(2, 4))
        assert trainers.asked.wait(PATIENCE)
        trainers.futures[0].set_running_or_notify_cancel()
        pending = [client.build_index("a", 0, 0, 40, PQParams(2, 4)) for _ in range(12)]
        client.stats()
        client.end("a")
        # What no trainer has begun is given up at once; slabs under training wait for the trainer.
        for future in pending:
            assert isinstance(future.exception(10.0), NotInStore)
        assert not begun.done()
        held = client.stats()
        assert (held.num_sequences, held.num_indexes) == (0, 0)
        assert held.index_bytes > 0
        # what trainers read and write cannot be given up
        assert held.leased_bytes == held.reserved_bytes > base + held.index_bytes
        trainers.futures[0].set_result(TrainOutcome(0.1, 1))
        assert isinstance(begun.exception(10.0), NotInStore)
        after = client.stats()
        assert (after.reserved_bytes, after.leased_bytes, after.index_bytes) == (base, base, 0)
        assert after.num_indexes == 0
        client.close()


def test_heads_are_trained_apart_and_one_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = StuckTrainers()
    monkeypatch.setattr("kv_store.server.make_trainers", lambda *arguments: trainers)
    with LocalStore(256 * 4096, slab_bytes=4096) as running:
        client = StoreClient.connect(running.target, LAYOUT, worker_id="w", max_gather_rows=8)
        filled(client, 40)
        base = client.stats().reserved_bytes
        begun = client.build_index("a", 0, 0, 40, PQParams(2, 4))
        assert trainers.asked.wait(PATIENCE)
        client.stats()
        assert trainers.heads == [(head, head + 1) for head in range(LAYOUT.num_kv_heads)]
        first, *others = trainers.futures
        for each in others:
            each.set_running_or_notify_cancel()
        first.set_exception(InvalidStoreRequest("the keys hold a NaN"))
        # The slabs are still being written.
        with pytest.raises(TimeoutError):
            begun.exception(0.1)
        assert client.stats().reserved_bytes > base
        for each in others:
            each.set_result(TrainOutcome(0.1, 1))
        assert isinstance(begun.exception(10.0), InvalidStoreRequest)
        assert client.stats().reserved_bytes == base
        client.close()


@pytest.mark.parametrize(
    "params",
    [
        PQParams(4, 5, 7),
        PQParams(2, 6, 0, "ip"),
        PQParams(2, 6, 0, "l2", True),
        *(KMeansParams(9, m, 3) for m in ("cosine", "l2", "ip")),
        BitParams(3),
    ],
)
def test_index_parameters_come_back_from_their_message(params: IndexParams) -> None:
    assert wire.params_from_message(wire.build_index(params)) == params


def test_pq_of_no_metric_is_by_l2_and_other_metrics_must_be_known() -> None:
    plain = pb.BuildIndexRequest(pq=pb.PQParams(num_subvectors=2, num_bits=6))
    assert wire.params_from_message(plain) == PQParams(2, 6, 0, "l2")
    for request in (
        pb.BuildIndexRequest(pq=pb.PQParams(metric=9)),
        pb.BuildIndexRequest(kmeans=pb.KMeansParams(metric=9)),
        pb.BuildIndexRequest(kmeans=pb.KMeansParams(num_clusters=4)),
    ):
        with pytest.raises(InvalidStoreRequest, match="metric"):
            wire.params_from_message(request)
