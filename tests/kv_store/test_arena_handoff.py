"""The arena socket: what a receiver must refuse, and what a giver must survive."""

import errno
import fcntl
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from waiting import PATIENCE

from kv_store.arena import Arena, HandoffServer
from kv_store.client.errors import HandoffRefused, StoreUnreachable
from kv_store.client.handoff import SEALS, ArenaHandle, receive_arena
from kv_store.errors import ConfigError

SIZE = 8192
HANDLE = ArenaHandle(b"r" * 16, 77, SIZE)


def sealed_file(size: int = SIZE, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@contextmanager
def giver(path: Path, give: Callable[[socket.socket], None]) -> Iterator[str]:
    """Answers one connection with whatever `give` sends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                give(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield str(path)
        thread.join(PATIENCE)


def refused(path: Path, header: bytes, descriptors: list[int]) -> None:
    def give(connection: socket.socket) -> None:
        if descriptors:
            socket.send_fds(connection, [header], descriptors)
        else:
            connection.sendall(header)

    with giver(path, give) as address, pytest.raises(HandoffRefused):
        receive_arena(address, HANDLE, PATIENCE)
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(SIZE)
    yield made
    made.close()


@pytest.fixture
def path(arena: Arena, tmp_path: Path) -> Iterator[str]:
    """A socket that hands the arena out."""
    with closing(HandoffServer(arena, f"{tmp_path}/served.sock")):
        yield f"{tmp_path}/served.sock"


def test_the_mapping_is_shared(arena: Arena, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    server = HandoffServer(arena, str(path))
    assert os.stat(path).st_mode & 0o777 == 0o600
    mapped = receive_arena(str(path), arena.handle, PATIENCE)
    mapped[SIZE - 1] = 9
    assert arena.data[SIZE - 1] == 9
    server.close()
    assert not path.exists()


@pytest.mark.parametrize("size", [SIZE - 4096, SIZE + 4096])
def test_the_arena_cannot_be_resized(arena: Arena, size: int) -> None:
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(arena.descriptor, size)


def test_random_bytes_from_a_peer_do_not_disturb_the_giver(arena: Arena, path: str) -> None:
    for _ in range(5):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(path)
            # The giver never reads, and may have hung up already.
            with suppress(BrokenPipeError):
                peer.sendall(os.urandom(300))
    assert receive_arena(path, arena.handle, PATIENCE).size == SIZE


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"x",
        # the same in every process, as pytest-xdist asks of a test's name
        random.Random(0).randbytes(44),
        HANDLE.pack()[:-1],
        b"X" + HANDLE.pack()[1:],
        ArenaHandle(b"s" * 16, 77, SIZE).pack(),
        ArenaHandle(b"r" * 16, 78, SIZE).pack(),
        ArenaHandle(b"r" * 16, 77, SIZE * 2).pack(),
    ],
)
def test_another_header_is_refused(tmp_path: Path, header: bytes) -> None:
    refused(tmp_path / "a.sock", header, [sealed_file()] if header else [])


def closed_pipe() -> int:
    descriptor, writer = os.pipe()
    os.close(writer)
    return descriptor


@pytest.mark.parametrize(
    "make",
    [
        lambda: sealed_file(SIZE - 4096),
        lambda: sealed_file(SIZE + 4096),
        lambda: sealed_file(seals=0),
        lambda: sealed_file(seals=fcntl.F_SEAL_GROW),
        lambda: os.open("/", os.O_RDONLY),
        lambda: os.open("/dev/zero", os.O_RDWR),
        closed_pipe,
    ],
    ids=["short", "long", "unsealed", "half sealed", "directory", "device", "pipe"],
)
def test_another_descriptor_is_refused(tmp_path: Path, make: Callable[[], int]) -> None:
    refused(tmp_path / "a.sock", HANDLE.pack(), [make()])


def test_one_descriptor_and_no_more(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    refused(tmp_path / "a.sock", HANDLE.pack(), [sealed_file(), sealed_file()])
    refused(tmp_path / "b.sock", HANDLE.pack(), [])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_silent_or_missing_giver_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreachable):
        receive_arena(str(tmp_path / "none.sock"), HANDLE, 0.2)
    done = threading.Event()
    with giver(tmp_path / "a.sock", lambda connection: bool(done.wait(PATIENCE)) and None) as path:
        with pytest.raises(StoreUnreachable):
            receive_arena(path, HANDLE, 0.2)
        done.set()


def test_where_no_descriptor_is_left_the_giver_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EMFILE, "no descriptor is left")

    monkeypatch.setattr(socket, "socket", fail)
    with pytest.raises(StoreUnreachable, match="no descriptor is left"):
        receive_arena(str(tmp_path / "a.sock"), HANDLE, 0.2)


def test_a_second_store_does_not_take_a_live_socket(arena: Arena, path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another store"):
        HandoffServer(arena, path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "stale"))
    HandoffServer(arena, str(tmp_path / "stale")).close()


def test_a_file_that_is_no_socket_is_spared(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        HandoffServer(arena, str(tmp_path / "notes"))
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_connection_that_cannot_be_accepted_is_not_the_last(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = socket.socket.accept
    failures = [OSError(errno.EMFILE, "no descriptor is left"), MemoryError()]

    def fail_once(listener: socket.socket) -> object:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    with closing(HandoffServer(arena, str(tmp_path / "a.sock"))):
        assert receive_arena(str(tmp_path / "a.sock"), arena.handle, PATIENCE).size == SIZE
    assert not failures
