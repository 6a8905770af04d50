"""Calls of the offloader to the store, and the tables of slabs that the device reads meanwhile."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from offload_rig import (
    FULL,
    MAX_MODEL_LEN,
    as_bytes,
    attached,
    count_calls,
    make_sequence,
    random_rows,
    restart,
)

from gpu_worker.device import Mark
from gpu_worker.errors import ArenaFull, StoreUnavailable
from gpu_worker.policies.recall import IndexJob
from gpu_worker.state.sequence import Sequence
from gpu_worker.store.host_registration import RegistrationFailed
from gpu_worker.store.offload import Offloader
from kv_store.client import PQParams, StaleEpoch, StoreClient, StoreUnreachable

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
CPU = DEVICES[0]
TOKEN_BYTES = FULL.num_layers * FULL.token_bytes


def make_offloader(
    client: StoreClient, device: torch.device = CPU, hides_training: bool = False
) -> Offloader:
    return Offloader(
        client,
        device,
        num_seats=2,
        max_model_len=MAX_MODEL_LEN,
        hides_training=hides_training,
    )


def store_layers(offloader: Offloader, sequence: Sequence, layers: range, rows: torch.Tensor) -> Mark:
    stored = offloader.store_layers(sequence, layers, rows)
    assert stored is not None
    return stored


def prefill(offloader: Offloader, sequence: Sequence, device: torch.device = CPU) -> torch.Tensor:
    """Rows of every layer; layer l's are these plus l."""
    rows = random_rows(FULL, sequence.num_prefill)
    offloader.extents.open(sequence, sequence.num_prefill + 1)
    for layer in range(FULL.num_layers):
        on_device = (rows + layer).to(device)
        store_layers(offloader, sequence, range(layer, layer + 1), on_device[None]).wait()
        offloader.seal_layers(sequence, range(layer, layer + 1), sequence.num_prefill)
    sequence.num_tokens = sequence.num_prefill
    return rows


def tables(offloader: Offloader) -> np.ndarray:
    assert offloader.arena.view is not None
    return offloader.arena.view.slab_tables.cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_s_slabs_are_in_the_table_from_its_layers_on_until_it_ends(device: torch.device) -> None:
    with attached(FULL) as (_, client):
        offloader = make_offloader(client, device)
        reserved = count_calls(client, "reserve")
        sequence = make_sequence("a", 1, 63)
        offloader.extents.open(sequence, 64)
        assert (tables(offloader) == -1).all()
        rows = random_rows(FULL, 63).to(device)
        for layer in range(FULL.num_layers):
            store_layers(offloader, sequence, range(layer, layer + 1), rows[None]).wait()
            offloader.seal_layers(sequence, range(layer, layer + 1), sequence.num_prefill)
            assert ((tables(offloader)[1, : layer + 1, :2]) >= 0).all()
            assert (tables(offloader)[1, layer + 1 :] == -1).all()
        assert offloader.offloaded_bytes == 63 * TOKEN_BYTES
        offloader.extents.reserve(sequence, 64)
        assert not reserved
        offloader.extents.reserve(sequence, 65)
        offloader.extents.reserve(sequence, 96)
        assert len(reserved) == 1
        assert (tables(offloader)[1, :, :3] >= 0).all()
        num_slabs = -(-min(65 + 4 * 32, sequence.capacity) // 32)
        assert (tables(offloader)[1, :, num_slabs:] == -1).all()
        assert (tables(offloader)[0] == -1).all()
        offloader.extents.release(sequence)
        assert (tables(offloader) == -1).all()
        assert client.stats().num_sequences == 0
        offloader.close()


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_prefilled_is_read_back_through_the_host(device: torch.device) -> None:
    with attached(FULL) as (_, client):
        offloader = make_offloader(client, device)
        sequence = make_sequence("a", 0, 70)
        rows = prefill(offloader, sequence, device)
        positions = np.array([69, 0, 32, 31])
        found = offloader.host.fetch(2, [(sequence, 1, positions), (sequence, 0, positions[:1])])
        assert torch.equal(found.cpu()[:4], (rows + 2)[1, positions])
        assert torch.equal(found.cpu()[4], (rows + 2)[0, 69])
        assert sequence.fetched_bytes == offloader.host.fetched_bytes == 5 * FULL.row_format.row_bytes
        offloader.host.count(sequence, 3)
        assert sequence.fetched_bytes == offloader.host.fetched_bytes == 8 * FULL.row_format.row_bytes
        assert torch.equal(offloader.host.inspect(sequence, 1, FULL.num_kv_heads).cpu(), rows + 1)
        offloader.close()


def test_what_the_device_wrote_is_counted_once_and_sealed_when_it_is_needed() -> None:
    with attached(FULL) as (_, client):
        offloader = make_offloader(client)
        sequence = make_sequence("a", 0, 62)
        prefill(offloader, sequence)
        sealed = count_calls(client, "seal")
        for num_tokens in range(62, 100):
            offloader.extents.reserve(sequence, num_tokens + 1)
            offloader.note_written(sequence, num_tokens)
            assert offloader.offloaded_bytes == num_tokens * TOKEN_BYTES
        assert sealed == []
        sequence.num_tokens = 99
        offloader.host.fetch(0, [(sequence, 0, np.array([98]))])
        assert sealed == [("a", 99)]
        offloader.note_written(sequence, 99)
        offloader.close()


def test_tokens_put_by_the_host_count_as_written() -> None:
    with attached(FULL, "shm") as (_, client):
        offloader = make_offloader(client)
        assert offloader.arena.view is None
        assert not offloader.arena.copies_aside
        sequence = make_sequence("a", 0, 63)
        prefill(offloader, sequence)
        token = random_rows(FULL, FULL.num_layers, seed=5).transpose(0, 1)
        offloader.store_token(sequence, 63, as_bytes(token))
        sequence.num_tokens = 64
        assert offloader.offloaded_bytes == 64 * TOKEN_BYTES
        assert torch.equal(offloader.host.fetch(1, [(sequence, 1, np.array([63]))])[0], token[1, 1])
        offloader.close()


def test_no_room_says_how_much_is_missing_and_leaves_the_table_alone() -> None:
    with attached(FULL, num_slabs=12) as (_, client):
        offloader = make_offloader(client)
        sequence = make_sequence("a", 0, 100)
        prefill(offloader, sequence)
        before = tables(offloader).copy()
        with pytest.raises(ArenaFull, match="bytes") as full:
            offloader.extents.reserve(sequence, 129)
        assert full.value.missing_bytes == FULL.num_layers * client.slab_bytes
        assert "unix:" not in str(full.value)
        assert "'a'" not in str(full.value)
        assert (tables(offloader) == before).all()
        with pytest.raises(ArenaFull, match="bytes"):
            offloader.extents.open(make_sequence("b", 1, 30), 31)
        assert (tables(offloader) == before).all()
        offloader.close()


def test_attaching_anew_gives_another_view_without_slabs() -> None:
    with attached(FULL) as (store, client):
        offloader = make_offloader(client)
        old, new = make_sequence("old", 0, 40), make_sequence("new", 1, 40)
        prefill(offloader, old)
        before = offloader.arena.view
        assert before is not None
        restart(store, client)
        rows = prefill(offloader, new)
        assert offloader.arena.view is not before
        assert before.bytes.numel() == 0
        assert old not in offloader.extents
        assert (tables(offloader)[0] == -1).all()
        offloader.extents.release(old)
        assert torch.equal(offloader.host.inspect(new, 0, FULL.num_kv_heads), rows)
        offloader.close()


def test_nothing_is_held_and_nothing_mapped_while_no_store_answers() -> None:
    with attached(FULL, timeout_seconds=0.5) as (store, client):
        offloader = make_offloader(client)
        sequence = make_sequence("a", 0, 40)
        prefill(offloader, sequence)
        store.server.close()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                offloader.extents.open(make_sequence("b", 1, 40), 41)
        assert offloader.arena.view is None
        assert sequence not in offloader.extents
        assert not offloader.link.is_reachable
        offloader.extents.release(sequence)
        offloader.close()


@pytest.mark.parametrize("lost", [StaleEpoch("dropped"), StoreUnreachable("silent")])
def test_a_lost_lease_is_known_without_asking(lost: Exception) -> None:
    with attached(FULL) as (_, client):
        offloader = make_offloader(client)
        sequence = make_sequence("a", 0, 40)
        offloader.extents.open(sequence, 41)
        offloader.link.check()

        def check() -> None:
            raise lost

        client.check = check  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            offloader.link.check()
        with pytest.raises(StoreUnavailable):
            offloader.store_layers(sequence, range(1), random_rows(FULL, 40)[None])
        assert not offloader.link.is_reachable
        offloader.close()


def test_refused_memory_is_said_once_and_rows_go_through_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with attached(FULL) as (store, client):
        offloader = make_offloader(client)
        sequence = make_sequence("a", 0, 40)
        offloader.extents.open(sequence, 41)

        def refuse(*arguments: object) -> None:
            raise RegistrationFailed("no memory to lock")

        assert offloader.arena.view is not None
        monkeypatch.setattr(offloader.arena.view, "adopt", refuse)
        rows = random_rows(FULL, 40)
        with caplog.at_level(logging.WARNING):
            layers = range(FULL.num_layers)
            store_layers(offloader, sequence, layers, rows.expand(len(layers), *rows.shape))
            offloader.seal_layers(sequence, range(FULL.num_layers), 40)
            assert offloader.arena.view is None
            restart(store, client)
            offloader.extents.open(make_sequence("b", 1, 40), 41)
        assert offloader.arena.view is None
        assert [record.getMessage() for record in caplog.records if "no memory" in record.getMessage()] == [
            "rows of the KV store go through the host, which is slower: no memory to lock"
        ]
        offloader.close()


@pytest.mark.parametrize("hides_training", [False, True])
def test_prefill_times_bound_the_training_only_where_they_are_to(hides_training: bool) -> None:
    with attached(FULL) as (_, client):
        offloader = make_offloader(client, hides_training=hides_training)
        sequence = make_sequence("a", 0, 200)
        prefill(offloader, sequence)
        asked = count_calls(client, "build_index")
        free, fixed = PQParams(2, 2), PQParams(2, 2, max_iterations=7)
        iterations = []
        for params in (free, fixed, free, fixed):
            trained = offloader.link.build_index(sequence, 0, IndexJob(4, 200, params), prefill_seconds=60.0)
            segment = offloader.link.load_index(trained, 30.0)
            assert segment is not None
            iterations.append(segment.iterations)
        assert [call[-1] for call in asked] == [60.0 if hides_training else 0.0] * 4
        # The store knows an iteration's time once it has made some; what is fixed stays fixed.
        assert iterations == [10, 7, 300 if hides_training else 10, 7]
        offloader.close()


@pytest.mark.gpu
def test_an_end_waits_for_no_work_of_others() -> None:
    device = torch.device("cuda")
    with attached(FULL) as (_, client):
        offloader = make_offloader(client, device)
        sequence, other = make_sequence("a", 0, 200), make_sequence("b", 1, 200)
        for each in sequence, other:
            offloader.extents.open(each, 201)
        rows = random_rows(FULL, 200).to(device)
        torch.cuda._sleep(200_000_000)
        copied = store_layers(offloader, other, range(1), rows[None])
        offloader.extents.release(sequence)
        assert not copied.is_reached
        copied.wait()
        offloader.close()


def test_a_growing_sequence_asks_for_some_slabs_at_once_while_there_is_room() -> None:
    with attached(FULL, num_slabs=FULL.num_layers * 9) as (_, client):
        offloader = make_offloader(client)
        sequence, other = make_sequence("a", 0, 32), make_sequence("b", 1, 32)
        sequence.capacity = other.capacity = 1000
        for each in sequence, other:
            offloader.extents.open(each, 32)
        reserved = count_calls(client, "reserve")
        for num_tokens in range(33, 193):
            offloader.extents.reserve(sequence, num_tokens)
        assert len(reserved) == 1
        # The slabs of each layer that are left are no room for five.
        offloader.extents.reserve(other, 33)
        assert (tables(offloader)[1] >= 0).sum() == 2 * FULL.num_layers
        with pytest.raises(ArenaFull):
            offloader.extents.reserve(other, 97)
        offloader.close()
