"""Layers written and read on a side stream are, to the bit, those that the host would have written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from offload_rig import FULL, LOOSE, SLAB_BYTES, as_bytes, attached, random_rows, view_of

from gpu_worker.device import Mark
from gpu_worker.store.layer_copies import LayerCopies, contiguous_runs
from kv_store.client import Layout, RowFormat, RowsWanted

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [FULL, LOOSE])
@pytest.mark.parametrize("stage_slabs", [0, 1, 3, 64])
@pytest.mark.parametrize("num_tokens", [1, 32, 97, 160, 163])
def test_the_arena_holds_what_the_host_would_have_put(
    num_tokens: int, stage_slabs: int, layout: Layout, device: torch.device
) -> None:
    with attached(layout, num_slabs=64) as (_, client):
        view = view_of(client, device, granule_slabs=4)
        writer = LayerCopies(view, device, stage_slabs * SLAB_BYTES)
        # Sequences that grow in turn: no layer's slabs are all in a row.
        for name in ("mine", "theirs"):
            client.begin(name, 0)
        for reserved in range(30, num_tokens + 31, 60):
            client.reserve("theirs", min(reserved, 60))
            table = client.reserve("mine", min(reserved, num_tokens))
        table = client.reserve("mine", num_tokens + 1)
        view.adopt(0, table)
        client.arena[:] = 0
        rows = random_rows(layout, num_tokens, seed=num_tokens)
        on_device = rows.to(device)
        every = torch.stack([on_device + layer for layer in range(layout.num_layers)])
        mark = writer.write(every, table)
        mark.wait()
        assert mark.is_reached
        for layer in range(layout.num_layers):
            client.seal("mine", num_tokens, layer, layer + 1)
            wanted = [RowsWanted("mine", head, np.arange(num_tokens)) for head in range(layout.num_kv_heads)]
            expected = as_bytes(rows + layer).reshape(-1, layout.row_format.row_bytes)
            assert (client.gather(layer, wanted) == expected).all()
        # Nothing else was written: not behind the last token, not behind a slab's rows, not elsewhere.
        num_slabs = -(-num_tokens // client.tokens_per_slab)
        held = int(np.count_nonzero(client.arena))
        assert held == sum(np.count_nonzero(as_bytes(rows + layer)) for layer in range(layout.num_layers))
        written = {int(slab) for slab in table[:, :num_slabs].flat}
        slabs = client.arena.reshape(-1, SLAB_BYTES).any(axis=1)
        assert set(np.flatnonzero(slabs).tolist()) == written
        view.close()


@pytest.mark.gpu
def test_copies_run_beside_the_stream_and_see_what_was_queued_before() -> None:
    layout = Layout(num_layers=1, num_kv_heads=8, row_format=RowFormat(128, "bf16"))
    device = torch.device("cuda")
    with attached(layout, num_slabs=8192) as (_, client):
        view = view_of(client, device, granule_slabs=8192, max_slabs=8192)
        writer = LayerCopies(view, device, 64 * SLAB_BYTES)
        table = client.begin("a", 4000).slab_table
        view.adopt(0, table)
        rows = torch.zeros(8, 4000, 256, dtype=torch.bfloat16, device=device)
        torch.cuda._sleep(200_000_000)
        rows += 3
        mark = writer.write(rows[None], table)
        assert not mark.is_reached
        # The host goes on, and so does the stream; what overwrites the rows waits.
        mark.hold()
        rows.zero_()
        mark.wait()
        client.seal("a", 4000)
        found = client.gather(0, [RowsWanted("a", 7, np.arange(0, 4000, 9))])
        assert (torch.from_numpy(np.array(found)).view(torch.bfloat16) == 3).all()
        view.close()


@pytest.mark.parametrize(
    ("slabs", "most", "per_granule", "runs"),
    [
        ([], 4, 8, []),
        ([5], 4, 8, [(0, 1)]),
        ([0, 1, 2, 3, 4], 2, 8, [(0, 2), (2, 4), (4, 5)]),
        ([6, 7, 8, 9], 9, 8, [(0, 2), (2, 4)]),
        ([3, 2, 1, 2], 9, 8, [(0, 1), (1, 2), (2, 4)]),
        ([1, 2, 3, 5, 6], 2, 4, [(0, 2), (2, 3), (3, 5)]),
    ],
)
def test_runs_are_slabs_in_a_row_of_one_granule(
    slabs: list[int], most: int, per_granule: int, runs: list[tuple[int, int]]
) -> None:
    assert contiguous_runs(np.array(slabs, np.int32), most, per_granule) == runs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [FULL, LOOSE])
@pytest.mark.parametrize("stage_slabs", [0, 3, 64])
@pytest.mark.parametrize("num_slabs", [1, 5])
def test_rows_come_back_as_they_were_put(
    num_slabs: int, stage_slabs: int, layout: Layout, device: torch.device
) -> None:
    with attached(layout, num_slabs=64) as (_, client):
        num_tokens = num_slabs * client.tokens_per_slab
        # Sequences that grow in turn: no layer's slabs are all in a row.
        for name in ("mine", "theirs"):
            client.begin(name, 0)
        for reserved in range(client.tokens_per_slab, num_tokens + 1, client.tokens_per_slab):
            client.reserve("theirs", min(reserved, 60))
            table = client.reserve("mine", reserved)
        view = view_of(client, device, granule_slabs=4)
        view.adopt(0, table)
        reader = LayerCopies(view, device, stage_slabs * SLAB_BYTES)
        # Behind the prefix there is room for what is computed, between heads too.
        rows = torch.zeros(layout.num_kv_heads, num_tokens + 7, 2 * layout.row_format.head_dim, device=device)
        rows = rows.to(random_rows(layout, 1).dtype)
        for layer in range(layout.num_layers):
            expected = random_rows(layout, num_tokens, seed=layer)
            client.put("mine", layer, 0, as_bytes(expected))
            reader.read(table[layer], rows[:, :num_tokens], Mark(device)).wait()
            assert torch.equal(rows[:, :num_tokens].cpu(), expected)
            assert not rows[:, num_tokens:].any()
        view.close()


@pytest.mark.gpu
def test_reading_runs_beside_the_stream_behind_what_was_queued_before() -> None:
    layout = Layout(num_layers=1, num_kv_heads=8, row_format=RowFormat(128, "bf16"))
    device = torch.device("cuda")
    with attached(layout, num_slabs=8192) as (_, client):
        view = view_of(client, device, granule_slabs=8192, max_slabs=8192)
        table = client.begin("a", 4000).slab_table
        view.adopt(0, table)
        num_tokens = table.shape[1] * client.tokens_per_slab
        expected = random_rows(layout, num_tokens)
        client.put("a", 0, 0, as_bytes(expected))
        rows = torch.zeros(8, num_tokens, 256, dtype=torch.bfloat16, device=device)
        reader = LayerCopies(view, device, 64 * SLAB_BYTES)
        torch.cuda._sleep(200_000_000)
        rows += 3
        mark = reader.read(table[0], rows)
        assert not mark.is_reached
        mark.hold()
        rows += 0
        assert torch.equal(rows.cpu(), expected)
        view.close()


def test_a_rows_words_may_be_of_four_bytes() -> None:
    layout = Layout(num_layers=1, num_kv_heads=1, row_format=RowFormat(1, "bf16"))
    with attached(layout, num_slabs=4) as (_, client):
        table = client.begin("a", client.tokens_per_slab).slab_table
        view = view_of(client, torch.device("cpu"), granule_slabs=4)
        view.adopt(0, table)
        expected = random_rows(layout, client.tokens_per_slab)
        client.put("a", 0, 0, as_bytes(expected))
        rows = torch.zeros_like(expected)
        assert LayerCopies(view, torch.device("cpu")).read(table[0], rows).is_reached
        assert np.array_equal(as_bytes(rows), as_bytes(expected))
        view.close()
