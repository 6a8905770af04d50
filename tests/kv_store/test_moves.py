"""Prefixes from one store to another: the same bytes, or nothing at all."""

from __future__ import annotations

import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from store_samples import LAYOUT, SLAB_BYTES, Clock, random_rows

from carrel.process.version import Edition
from kv_store.client import (
    InvalidStoreRequest,
    Layout,
    MoveFailed,
    NotInStore,
    RowsWanted,
    StaleEpoch,
    StoreClient,
    StoreError,
    StoreFull,
    wire,
)
from kv_store.client.wire import own_edition
from kv_store.config import StoreConfig
from kv_store.errors import ConfigError
from kv_store.local import LocalStore
from kv_store.moves.puller import MAX_PULLS
from kv_store.v1 import kv_store_pb2 as pb
from kv_store.v1 import kv_store_pb2_grpc

TOKEN = "a-secret-of-all-stores"
PER_SLAB = 32
NUM_SLABS = 5
HASHES = tuple(bytes([number]) * 32 for number in range(1, NUM_SLABS + 1))
SLAB_PAYLOAD = PER_SLAB * LAYOUT.token_bytes
TIMEOUT = 20.0


def start(num_slabs: int = 256, slab_bytes: int = SLAB_BYTES, **options: object) -> LocalStore:
    return LocalStore(num_slabs * slab_bytes, slab_bytes=slab_bytes, **options)  # type: ignore[arg-type]


def connect(store: LocalStore, layout: Layout = LAYOUT, worker_id: str = "w") -> StoreClient:
    return StoreClient.connect(
        store.target, layout, worker_id=worker_id, transport="zero_copy", timeout_seconds=5.0
    )


def fill(client: StoreClient, hashes: tuple[bytes, ...] = HASHES, seed: int = 0) -> list[np.ndarray]:
    """Leave a prefix in the store; its rows, layer by layer."""
    num_tokens, layout = len(hashes) * PER_SLAB, client.layout
    rows = [random_rows(layout, num_tokens, 10 * seed + layer) for layer in range(layout.num_layers)]
    client.open_sequence("filling")
    client.reserve("filling", num_tokens)
    for layer, of_layer in enumerate(rows):
        client.put("filling", layer, 0, of_layer)
    client.seal("filling", num_tokens, prefix_hashes=hashes)
    client.release("filling")
    return rows


def found(client: StoreClient, hashes: tuple[bytes, ...] = HASHES) -> list[np.ndarray]:
    """The rows that a store has of a prefix, layer by layer."""
    client.open_sequence("finding")
    try:
        match = client.lookup_prefix("finding", hashes)
        positions = np.arange(match.num_tokens)
        return [
            np.stack(
                [
                    client.gather(layer, [RowsWanted("finding", head, positions)])
                    for head in range(client.layout.num_kv_heads)
                ]
            )
            for layer in range(client.layout.num_layers)
        ]
    finally:
        client.release("finding")


def same(rows: list[np.ndarray], expected: list[np.ndarray], num_tokens: int) -> bool:
    return all(np.array_equal(one, other[:, :num_tokens]) for one, other in zip(rows, expected, strict=True))


def eventually(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


Alter = Callable[[Iterator[pb.PrefixPart]], Iterator[pb.PrefixPart]]


class Relay(kv_store_pb2_grpc.PrefixSourceServicer):
    """Passes a real source's parts on, altered."""

    def __init__(self, target: str, alter: Alter) -> None:
        self._target = target
        self._alter = alter

    def ReadPrefix(
        self, request: pb.ReadPrefixRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.PrefixPart]:
        with grpc.insecure_channel(self._target) as channel:
            call = kv_store_pb2_grpc.PrefixSourceStub(channel).ReadPrefix(request, timeout=TIMEOUT)
            context.add_callback(call.cancel)
            yield from self._alter(call)


@contextmanager
def relay(folder: Path, target: str, alter: Alter) -> Iterator[tuple[str, grpc.Server]]:
    server = grpc.server(ThreadPoolExecutor(8))
    kv_store_pb2_grpc.add_PrefixSourceServicer_to_server(Relay(target, alter), server)
    address = f"unix:{folder}/relay"
    server.add_insecure_port(address)
    server.start()
    yield address, server
    server.stop(None).wait(TIMEOUT)


class Pair:
    """A store with a prefix, and one without."""

    def __init__(self, **options: object) -> None:
        self.giver, self.taker = start(), start(**options)
        self.giving, self.taking = connect(self.giver), connect(self.taker)
        self.rows = fill(self.giving)
        self.idle = self.held()

    def held(self) -> tuple[int, int]:
        return self.giving.stats().reserved_bytes, self.taking.stats().reserved_bytes

    def is_as_before(self) -> bool:
        """Nothing is held anywhere that was not, and the giver may evict all of the prefix again."""
        return self.held() == self.idle and self.evictable() == NUM_SLABS * LAYOUT.num_layers

    def evictable(self) -> int:
        state = self.giver.server.store._state
        with state.lock:
            return state.prefixes.num_evictable_slabs()

    def close(self) -> None:
        self.giving.close()
        self.taking.close()
        self.giver.close()
        self.taker.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_prefix_arrives_with_the_same_bytes_and_both_stores_hold_nothing_more(pair: Pair) -> None:
    pulled = pair.taking.pull_prefix(pair.giver.target, HASHES)
    num_tokens = NUM_SLABS * PER_SLAB
    assert (pulled.num_tokens, pulled.moved_tokens) == (num_tokens, num_tokens)
    assert pulled.moved_bytes == NUM_SLABS * LAYOUT.num_layers * SLAB_PAYLOAD
    assert same(found(pair.taking), pair.rows, num_tokens)
    eventually(lambda: pair.evictable() == NUM_SLABS * LAYOUT.num_layers)
    assert pair.held() == (pair.idle[0], pair.idle[1] + NUM_SLABS * LAYOUT.num_layers * SLAB_BYTES)
    # It is a prefix like any other: whoever needs the room has it.
    pair.taking.open_sequence("large")
    pair.taking.reserve("large", 128 * PER_SLAB)
    assert same(found(pair.taking), pair.rows, 0)


def test_large_slabs_are_sent_in_several_chunks() -> None:
    layout = Layout(2, 2, 64, "fp32")
    hashes = HASHES[:2]
    with start(8, 4 << 20) as giver, start(8, 4 << 20) as taker:
        giving, taking = connect(giver, layout), connect(taker, layout)
        per_slab = giving.tokens_per_slab
        assert per_slab * layout.token_bytes == 4 << 20
        rows = [random_rows(layout, 2 * per_slab, layer) for layer in range(2)]
        giving.open_sequence("a")
        giving.reserve("a", 2 * per_slab)
        for layer in range(2):
            giving.put("a", layer, 0, rows[layer])
        giving.seal("a", 2 * per_slab, prefix_hashes=hashes)
        assert taking.pull_prefix(giver.target, hashes).moved_bytes == 16 << 20
        assert same(found(taking, hashes), rows, 2 * per_slab)
        giving.close()
        taking.close()


def test_only_what_is_missing_is_moved(pair: Pair) -> None:
    assert pair.taking.pull_prefix(pair.giver.target, HASHES[:2]).moved_tokens == 2 * PER_SLAB
    again = pair.taking.pull_prefix(pair.giver.target, HASHES)
    assert (again.num_tokens, again.moved_tokens) == (NUM_SLABS * PER_SLAB, 3 * PER_SLAB)
    assert same(found(pair.taking), pair.rows, NUM_SLABS * PER_SLAB)
    assert pair.taking.pull_prefix(pair.giver.target, HASHES).moved_bytes == 0
    # What was here before is held no longer than the moves took.
    pair.taking.open_sequence("large")
    pair.taking.reserve("large", 128 * PER_SLAB)


def test_whoever_does_not_know_the_hashes_gets_nothing(pair: Pair) -> None:
    unknown = tuple(bytes([number]) * 32 for number in range(101, 104))
    for hashes in (unknown, (unknown[0], *HASHES[1:]), ()):
        pulled = pair.taking.pull_prefix(pair.giver.target, hashes)
        assert (pulled.num_tokens, pulled.moved_bytes) == (0, 0)
    # A chain that leaves the known one is followed as far as it goes.
    forked = (*HASHES[:2], *unknown)
    assert pair.taking.pull_prefix(pair.giver.target, forked).num_tokens == 2 * PER_SLAB


def test_over_tcp_the_token_is_asked_for() -> None:
    with start(peer_listen="127.0.0.1:0", peer_token=TOKEN) as giver:
        rows = fill(giving := connect(giver))
        address = f"127.0.0.1:{giver.server.peer_port}"
        for token in ("", "a-secret-of-other-stores"):
            with start(peer_token=token) as stranger:
                client = connect(stranger)
                with pytest.raises(MoveFailed, match="CARREL_PEER_TOKEN") as caught:
                    client.pull_prefix(address, HASHES)
                assert TOKEN not in str(caught.value)
                client.close()
        with start(peer_token=TOKEN) as friend:
            client = connect(friend)
            assert client.pull_prefix(address, HASHES).num_tokens == NUM_SLABS * PER_SLAB
            assert same(found(client), rows, NUM_SLABS * PER_SLAB)
            client.close()
        with grpc.insecure_channel(address) as channel:
            # Nothing else of the store answers there.
            with pytest.raises(grpc.RpcError) as refused:
                kv_store_pb2_grpc.KVStoreStub(channel).Stats(pb.StatsRequest(), timeout=5)
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
        giving.close()


def flip(part: pb.PrefixPart) -> pb.PrefixPart:
    data = bytearray(part.chunk.data)
    data[len(data) // 2] ^= 1
    return pb.PrefixPart(chunk=pb.PrefixChunk(data=bytes(data), checksum=part.chunk.checksum))


def resized(part: pb.PrefixPart, by: int) -> pb.PrefixPart:
    data = part.chunk.data[:by] if by < 0 else part.chunk.data + bytes(by)
    return pb.PrefixPart(chunk=pb.PrefixChunk(data=data, checksum=zlib.crc32(data)))


def header(num_found: int, num_bytes: int) -> pb.PrefixPart:
    return pb.PrefixPart(header=pb.PrefixHeader(num_found=num_found, num_bytes=num_bytes))


Parts = list[pb.PrefixPart]
TOTAL = NUM_SLABS * LAYOUT.num_layers * SLAB_PAYLOAD
FAULTS: dict[str, tuple[Callable[[Parts], Parts], str]] = {
    "a bit of the first chunk": (lambda p: [p[0], flip(p[1]), *p[2:]], "checksum"),
    "a bit of the last chunk": (lambda p: [*p[:-2], flip(p[-2]), p[-1]], "checksum"),
    "two chunks change places": (lambda p: [p[0], p[2], p[1], *p[3:]], "checksum"),
    "one chunk for another": (lambda p: [p[0], p[2], *p[2:]], "checksum"),
    "a chunk is missing": (lambda p: [p[0], *p[2:]], "bytes came"),
    "a chunk too many": (lambda p: [*p[:-1], p[1], p[-1]], "after"),
    "a chunk too short": (lambda p: [p[0], resized(p[1], -1), *p[2:]], "bytes came|after"),
    "a chunk too long": (lambda p: [*p[:-2], resized(p[-2], 1), p[-1]], "after"),
    "an empty chunk": (lambda p: [p[0], pb.PrefixPart(chunk=pb.PrefixChunk()), *p[1:]], "0 bytes"),
    "another digest": (lambda p: [*p[:-1], pb.PrefixPart(trailer=pb.PrefixTrailer(digest=b"x"))], "checksum"),
    "no trailer": (lambda p: p[:-1], "trailer"),
    "no header": (lambda p: p[1:], "header"),
    "nothing": (lambda p: [], "header"),
    "two headers": (lambda p: [p[0], *p], "trailer"),
    "an empty part": (lambda p: [p[0], pb.PrefixPart(), *p[1:]], "trailer"),
    "too many found": (lambda p: [header(9, TOTAL), *p[1:]], "9 of 5"),
    "too many bytes": (lambda p: [header(5, 2**63), *p[1:]], "announced"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_is_wrong_with_what_comes_leaves_nothing_behind(
    pair: Pair, tmp_path: Path, fault: str
) -> None:
    break_it, message = FAULTS[fault]
    with relay(tmp_path, pair.giver.target, lambda parts: iter(break_it(list(parts)))) as (address, _):
        with pytest.raises(MoveFailed, match=message) as caught:
            pair.taking.pull_prefix(address, HASHES, TIMEOUT)
        assert "relay" in str(caught.value)
    eventually(pair.is_as_before)
    assert same(found(pair.taking), pair.rows, 0)
    assert pair.taking.pull_prefix(pair.giver.target, HASHES).num_tokens == NUM_SLABS * PER_SLAB
    assert same(found(pair.taking), pair.rows, NUM_SLABS * PER_SLAB)


class Gate:
    """Lets the header and three chunks through, then waits."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, parts: Iterator[pb.PrefixPart]) -> Iterator[pb.PrefixPart]:
        for number, part in enumerate(parts):
            if number == 4:
                self.reached.set()
                # Longer than anybody waits for the consequences.
                assert self.opened.wait(3 * TIMEOUT)
            yield part


@contextmanager
def half_way(
    pair: Pair, folder: Path, timeout: float = TIMEOUT
) -> Iterator[tuple[Gate, Future, grpc.Server]]:
    """A move that stands still in its midst."""
    gate = Gate()
    with relay(folder, pair.giver.target, gate) as (address, server), ThreadPoolExecutor(1) as threads:
        move = threads.submit(pair.taking.pull_prefix, address, HASHES, timeout)
        try:
            assert gate.reached.wait(TIMEOUT)
            yield gate, move, server
        finally:
            gate.opened.set()


def test_a_source_that_dies_half_way(pair: Pair, tmp_path: Path) -> None:
    with half_way(pair, tmp_path) as (_, move, server):
        eventually(lambda: pair.held()[1] > pair.idle[1])
        # What is here of an unfinished move is nobody's.
        assert same(found(pair.taking), pair.rows, 0)
        server.stop(None)
        with pytest.raises(MoveFailed, match="relay"):
            move.result(TIMEOUT)
    eventually(pair.is_as_before)


def test_a_source_that_falls_silent_half_way(pair: Pair, tmp_path: Path) -> None:
    with half_way(pair, tmp_path, 0.5) as (_, move, _):
        with pytest.raises(MoveFailed, match=r"(?i)deadline"):
            move.result(TIMEOUT)
        assert pair.held()[1] == pair.idle[1]
    eventually(pair.is_as_before)


def test_a_source_that_is_not_there(pair: Pair) -> None:
    for address in ("unix:/nowhere/at/all", "127.0.0.1:9"):
        with pytest.raises(MoveFailed, match=address):
            pair.taking.pull_prefix(address, HASHES, TIMEOUT)
    assert pair.is_as_before()


def test_a_host_that_does_not_answer_is_given_up_before_the_deadline(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(MoveFailed, match="failed to connect"):
            pair.taking.pull_prefix(address, HASHES, 15.0)


def test_a_caller_that_gives_up_ends_the_move_on_both_sides(pair: Pair, tmp_path: Path) -> None:
    gate = Gate()
    with (
        relay(tmp_path, pair.giver.target, gate) as (address, _),
        grpc.insecure_channel(pair.taker.target) as channel,
    ):
        request = pb.PullPrefixRequest(
            epoch=pair.taking.epoch,
            worker_id="w",
            source=address,
            prefix_hashes=HASHES,
            timeout_seconds=60,
        )
        call = kv_store_pb2_grpc.KVStoreStub(channel).PullPrefix.future(request, timeout=60)
        assert gate.reached.wait(TIMEOUT)
        call.cancel()
        eventually(lambda: pair.held()[1] == pair.idle[1])
        gate.opened.set()
    eventually(pair.is_as_before)


def test_a_worker_whose_lease_ran_out_half_way_leaves_nothing(tmp_path: Path) -> None:
    clock = Clock()
    pair = Pair(clock=clock)
    with half_way(pair, tmp_path) as (gate, move, _):
        clock.now += 100
        pair.taker.server.store.reap()
        gate.opened.set()
        with pytest.raises(StaleEpoch):
            move.result(TIMEOUT)
    assert pair.taking.stats().reserved_bytes == 0
    pair.close()


def reader(
    pair: Pair, hashes: tuple[bytes, ...] = HASHES, **options: object
) -> tuple[grpc.Channel, Iterator[pb.PrefixPart]]:
    channel = grpc.insecure_channel(pair.giver.target)
    request = pb.ReadPrefixRequest(
        edition=wire.edition_to_message(own_edition()),
        layout=wire.layout_to_message(LAYOUT),
        tokens_per_slab=PER_SLAB,
        prefix_hashes=hashes,
    )
    stub = kv_store_pb2_grpc.PrefixSourceStub(channel)
    return channel, stub.ReadPrefix(request, **{"timeout": 60.0, **options})


def test_what_is_being_read_is_not_evicted_and_free_once_the_reader_is_gone() -> None:
    # Enough that it does not fit what lies between reader and writer.
    layout = Layout(2, 2, 64, "fp32")
    hashes = HASHES[:4]
    with start(8, 4 << 20) as giver:
        giving = connect(giver, layout)
        per_slab = giving.tokens_per_slab
        giving.open_sequence("a")
        giving.reserve("a", 4 * per_slab)
        giving.seal("a", 4 * per_slab, prefix_hashes=hashes)
        giving.release("a")
        giving.open_sequence("large")
        with grpc.insecure_channel(giver.target) as channel:
            request = pb.ReadPrefixRequest(
                edition=wire.edition_to_message(own_edition()),
                layout=wire.layout_to_message(layout),
                tokens_per_slab=per_slab,
                prefix_hashes=hashes,
            )
            call = kv_store_pb2_grpc.PrefixSourceStub(channel).ReadPrefix(request, timeout=60)
            assert next(call).header.num_found == 4
            next(call)
            # Stays connected, and reads no more.
            with pytest.raises(StoreFull):
                giving.reserve("large", 4 * per_slab)
        eventually(lambda: reserved(giving, "large", 4 * per_slab))
        giving.close()


def reserved(client: StoreClient, sequence_id: str, num_tokens: int) -> bool:
    try:
        client.reserve(sequence_id, num_tokens)
    except StoreFull:
        return False
    return True


@pytest.mark.parametrize("timeout", [None, 10_000.0])
def test_reading_without_a_deadline_is_refused(pair: Pair, timeout: float | None) -> None:
    channel, parts = reader(pair, timeout=timeout)
    with channel, pytest.raises(grpc.RpcError) as caught:
        next(parts)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "deadline" in caught.value.details()


def test_no_room_is_said_before_a_byte_is_sent_and_costs_no_other_prefix() -> None:
    with start() as giver, start(12) as taker:
        giving, taking = connect(giver), connect(taker)
        fill(giving)
        others = (b"o" * 32,)
        kept = fill(taking, others, seed=1)
        taking.open_sequence("live")
        taking.reserve("live", PER_SLAB)
        before = taking.stats().reserved_bytes
        # 12 slabs: 2 are held, 2 could be evicted, 10 are wanted.
        taking.open_sequence("more")
        taking.reserve("more", PER_SLAB)
        with pytest.raises(StoreFull, match=f"{2 * SLAB_BYTES} bytes are missing"):
            taking.pull_prefix(giver.target, HASHES)
        assert same(found(taking, others), kept, PER_SLAB)
        taking.release("more")
        assert taking.stats().reserved_bytes == before
        # With that room it comes, for which the other prefix has to go.
        assert taking.pull_prefix(giver.target, HASHES).num_tokens == NUM_SLABS * PER_SLAB
        assert same(found(taking, others), kept, 0)
        giving.close()
        taking.close()


@pytest.mark.parametrize(
    ("layout", "slab_bytes", "message"),
    [
        (Layout(2, 2, 16, "fp16"), SLAB_BYTES, "row_type='fp16'"),
        (Layout(3, 2, 16, "bf16"), SLAB_BYTES, "num_layers=3"),
        (LAYOUT, 2 * SLAB_BYTES, "slabs of 64: "),
    ],
)
def test_layouts_are_compared_first(layout: Layout, slab_bytes: int, message: str) -> None:
    with start() as giver, start(64, slab_bytes) as taker:
        giving, taking = connect(giver), connect(taker, layout)
        fill(giving)
        with pytest.raises(MoveFailed, match=message):
            taking.pull_prefix(giver.target, HASHES)
        assert taking.stats().reserved_bytes == 0
        giving.close()
        taking.close()


def test_a_source_that_nobody_used_yet_has_no_layout() -> None:
    with start() as giver, start() as taker:
        taking = connect(taker)
        with pytest.raises(MoveFailed, match="no worker has attached"):
            taking.pull_prefix(giver.target, HASHES)
        taking.close()


def test_a_source_of_another_version_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_store.server.own_edition", lambda: Edition("9.9.9", "0badcafe"))
    with start() as other:
        with pytest.raises(MoveFailed, match=r"9\.9\.9") as caught:
            pair.taking.pull_prefix(other.target, HASHES)
        assert str(own_edition()) in str(caught.value)


def test_too_many_moves_at_once_are_told_so(pair: Pair, tmp_path: Path) -> None:
    gate = Gate()
    with (
        relay(tmp_path, pair.giver.target, gate) as (address, _),
        ThreadPoolExecutor(MAX_PULLS) as threads,
    ):
        moves = [threads.submit(pair.taking.pull_prefix, address, HASHES, TIMEOUT) for _ in range(MAX_PULLS)]
        eventually(lambda: pair.held()[1] >= pair.idle[1] + MAX_PULLS * 10 * SLAB_BYTES)
        with pytest.raises(StoreFull, match="too many"):
            pair.taking.pull_prefix(address, HASHES, TIMEOUT)
        gate.opened.set()
        # Several of the same prefix: one copy stays.
        assert {move.result(TIMEOUT).num_tokens for move in moves} == {NUM_SLABS * PER_SLAB}
    assert pair.held()[1] == pair.idle[1] + 10 * SLAB_BYTES
    assert same(found(pair.taking), pair.rows, NUM_SLABS * PER_SLAB)


def test_a_stale_epoch_moves_nothing(pair: Pair) -> None:
    pair.taker.restart()
    with pytest.raises(StaleEpoch):
        pair.taking.pull_prefix(pair.giver.target, HASHES)


@pytest.mark.parametrize(
    "source",
    [
        *("", "unix:", "unix:relative", "unix:/" + "x" * 200, "unix:/a\0b", "host", "host:", "host:port"),
        # no names that gRPC would resolve in its own ways, and no lists
        *("dns:///host:1", "http://host:1", "a b:1", "host:123456", "[::1:5", "host:1,other:2", "x" * 5000),
    ],
)
def test_a_source_that_is_no_address_is_refused(pair: Pair, source: str) -> None:
    with pytest.raises(InvalidStoreRequest, match="no store's address"):
        pair.taking.pull_prefix(source, HASHES)


@pytest.mark.parametrize(
    "call",
    [
        lambda client, target: client.pull_prefix(target, (b"short",)),
        lambda client, target: client.pull_prefix(target, HASHES, 0.0),
        lambda client, target: client.pull_prefix(target, HASHES, float("nan")),
        lambda client, target: client.pull_prefix(target, HASHES, 601.0),
        lambda client, target: client.pull_prefix(7, HASHES),
    ],
)
def test_other_values_out_of_range(pair: Pair, call: Callable[[StoreClient, str], object]) -> None:
    with pytest.raises(StoreError) as caught:
        call(pair.taking, pair.giver.target)
    assert isinstance(caught.value, InvalidStoreRequest)
    assert not isinstance(caught.value, NotInStore)
    assert pair.is_as_before()


@pytest.mark.parametrize(
    ("listen", "token", "message"),
    [
        ("0.0.0.0:7000", "", "CARREL_PEER_TOKEN"),
        ("127.0.0.1:7000", "short", "16 characters"),
        ("unix:/tmp/x", TOKEN, "HOST:PORT"),
        ("7000", TOKEN, "HOST:PORT"),
        (":7000", TOKEN, "HOST:PORT"),
        ("host:70000", TOKEN, "HOST:PORT"),
    ],
)
def test_where_stores_meet_needs_an_address_and_a_token(listen: str, token: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        StoreConfig("unix:/tmp/s", 1 << 21, peer_listen=listen, peer_token=token)
    assert not token or token not in str(caught.value)


def test_the_token_is_not_shown() -> None:
    assert TOKEN not in repr(StoreConfig("unix:/tmp/s", 1 << 21, peer_token=TOKEN))
