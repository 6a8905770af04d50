"""The arena as kernels see it: the same bytes as the store's, and tables that name registered slabs only."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from offload_rig import FULL, LOOSE, SLAB_BYTES, as_bytes, attached, random_rows
from waiting import wait_until

from gpu_worker.kernels.rows import ArenaLayout, gather_rows, scatter_rows
from gpu_worker.store.arena import ArenaView, map_arena
from gpu_worker.store.host_registration import HostRegistration, RegistrationFailed, register_with_cuda
from kv_store.client import Layout, RowFormat, RowsWanted

CPU = torch.device("cpu")
NUM_SEATS, MAX_MODEL_LEN = 3, 200
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


class Ledger:
    """Stands for CUDA: what is registered, by granule."""

    def __init__(self, mapping: np.ndarray, granule_bytes: int, refused: int = -1) -> None:
        self.sizes: dict[int, int] = {}
        self._base, self._granule_bytes = mapping.ctypes.data, granule_bytes
        self._refused = refused
        self.registration = HostRegistration(mapping, granule_bytes, self._register, self._unregister)

    def _register(self, address: int, num_bytes: int) -> None:
        granule = (address - self._base) // self._granule_bytes
        assert granule not in self.sizes
        if granule == self._refused:
            raise RegistrationFailed("no more")
        self.sizes[granule] = num_bytes

    def _unregister(self, address: int) -> None:
        del self.sizes[(address - self._base) // self._granule_bytes]


def small_view(registration: HostRegistration | None, mapping: np.ndarray) -> ArenaView:
    return ArenaView(mapping, ArenaLayout(64, 2, RowFormat(4)), 2, (2, 2, 4), CPU, registration)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [FULL, LOOSE])
def test_kernels_read_and_write_the_rows_of_the_store(layout: Layout, device: torch.device) -> None:
    with attached(layout) as (_, client):
        client.begin("other", 40)
        table = client.begin("a", 150).slab_table
        rows = random_rows(layout, 150)
        for layer in range(layout.num_layers):
            client.put("a", layer, 0, as_bytes(rows + layer))
        client.seal("a", 120)
        view = map_arena(client, NUM_SEATS, MAX_MODEL_LEN, device)
        view.adopt(1, table)
        positions = torch.tensor([149, 0, 77, -1, 5], device=device)
        seats = torch.tensor([1, 1, 1, 1, 2], device=device)
        offsets = view.offsets(seats, positions)
        assert offsets.shape == (5, layout.num_layers, layout.num_kv_heads)
        assert (offsets[3:] == -1).all()  # padding, and a seat without slabs
        pool = torch.zeros(offsets.numel(), 2 * layout.row_format.head_dim, dtype=rows.dtype, device=device)
        gather_rows(view.bytes, offsets.flatten(), pool, torch.arange(offsets.numel(), device=device))
        found = pool.view(*offsets.shape, -1).cpu()
        for row, position in enumerate((149, 0, 77)):
            for layer in range(layout.num_layers):
                assert torch.equal(found[row, layer], (rows + layer)[:, position])
        # The other way: a token that the store has not seen is read from it once it is sealed.
        pool = torch.arange(pool.numel(), device=device).view(pool.shape).to(pool.dtype)
        new = view.offsets(seats[:1], torch.tensor([120], device=device)).flatten()
        scatter_rows(view.bytes, new, pool, torch.arange(new.numel(), device=device))
        if device.type == "cuda":
            torch.cuda.synchronize()
        client.seal("a", 121)
        for layer in range(layout.num_layers):
            for head in range(layout.num_kv_heads):
                stored = client.gather(layer, [RowsWanted("a", head, np.array([120]))])
                place = layer * layout.num_kv_heads + head
                assert (stored == as_bytes(pool[place : place + 1])).all()
        view.close()
        assert view.bytes.numel() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_tables_follow_the_seats(device: torch.device) -> None:
    with attached(FULL) as (_, client):
        view = map_arena(client, NUM_SEATS, MAX_MODEL_LEN, device)
        first = client.begin("a", 33).slab_table
        assert view.slab_tables.shape == (NUM_SEATS, FULL.num_layers, 7)
        assert view.slab_tables.dtype == torch.int32
        view.adopt(2, first[1:2], layer_begin=1)
        expected = np.full(view.slab_tables.shape, -1, np.int32)
        expected[2, 1, :2] = first[1]
        assert (view.slab_tables.cpu().numpy() == expected).all()
        grown = client.reserve("a", 70)
        view.adopt(2, grown)
        expected[2, :, :3] = grown
        assert (view.slab_tables.cpu().numpy() == expected).all()
        view.adopt(0, grown)
        view.forget(2)
        expected[0], expected[2] = expected[2], -1
        assert (view.slab_tables.cpu().numpy() == expected).all()
        view.close()


def test_a_view_made_within_a_step_is_written_between_steps_too() -> None:
    with torch.inference_mode():
        view = small_view(None, np.zeros(512, np.uint8))
    view.adopt(0, np.zeros((2, 1), np.int32))
    view.forget(0)
    view.bytes[3] = 7
    with torch.inference_mode():
        view.adopt(1, np.zeros((2, 1), np.int32))
        view.forget(1)
    assert (view.slab_tables == -1).all()


def test_a_granule_is_registered_when_a_slab_of_it_comes_into_use() -> None:
    # Three granules of four slabs each; the last one is cut short.
    mapping = np.zeros(11 * 64, np.uint8)
    ledger = Ledger(mapping, 256)
    view = small_view(None, mapping)
    assert not ledger.sizes
    view = small_view(ledger.registration, mapping)
    view.adopt(0, np.array([[3, 2], [1, 0]], np.int32))
    assert set(ledger.sizes) <= {0}
    view.adopt(0, np.array([[10]], np.int32), layer_begin=1)
    view.adopt(1, np.array([[0, 9]], np.int32))
    assert ledger.sizes == {0: 256, 2: 192}
    assert view.granule_bytes == 256
    view.close()
    assert not ledger.sizes


def test_without_a_thread_granules_are_registered_as_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mapping = np.zeros(12 * 64, np.uint8)
    ledger = Ledger(mapping, 256)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        ledger.registration.start()
    assert "can't start new thread" in caplog.text
    assert ledger.registration.is_settled
    view = small_view(ledger.registration, mapping)
    view.adopt(0, np.array([[3], [9]], np.int32))
    assert set(ledger.sizes) == {0, 2}
    view.close()
    assert not ledger.sizes


def test_all_is_registered_ahead_but_what_is_refused_which_ends_who_needs_it() -> None:
    mapping = np.zeros(12 * 64, np.uint8)
    ledger = Ledger(mapping, 256, refused=1)
    ledger.registration.start()
    wait_until(lambda: ledger.registration.is_settled)
    assert set(ledger.sizes) == {0, 2}
    with pytest.raises(RegistrationFailed, match="no more"):
        ledger.registration.cover(np.array([300]))
    ledger.registration.close()
    assert not ledger.sizes


def test_nothing_is_registered_ahead_once_the_mapping_is_given_up() -> None:
    mapping = np.zeros(12 * 64, np.uint8)
    ledger = Ledger(mapping, 256)
    ledger.registration.close()
    ledger.registration.start()
    ledger.registration.close()
    assert not ledger.sizes


def test_a_slab_whose_memory_is_refused_does_not_reach_the_table() -> None:
    mapping = np.zeros(12 * 64, np.uint8)
    ledger = Ledger(mapping, 256, refused=1)
    view = small_view(ledger.registration, mapping)
    with pytest.raises(RegistrationFailed, match="no more"):
        view.adopt(0, np.array([[1, 5]], np.int32))
    assert (view.slab_tables == -1).all()


@pytest.mark.gpu
def test_cuda_registers_granules_of_the_store_and_gives_them_back() -> None:
    with attached(FULL, num_slabs=64) as (_, client):
        registration = register_with_cuda(client.arena, 16 * SLAB_BYTES, torch.device("cuda"))
        registration.cover(np.array([0, 40 * SLAB_BYTES]))
        registration.cover(np.array([0]))
        again = register_with_cuda(client.arena, 16 * SLAB_BYTES, torch.device("cuda"))
        with pytest.raises(RegistrationFailed, match="registered"):
            again.cover(np.array([0]))
        # The error is not left to the next launch.
        assert torch.ones(3, device="cuda").sum().item() == 3
        registration.close()
        again.cover(np.array([0]))
        again.close()
