"""A known prefix read beside computing has, to the bit, the rows that were written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from offload_rig import FULL, LOOSE, SLAB_BYTES, as_bytes, attached, random_rows, view_of

from gpu_worker.device import Mark
from gpu_worker.store.layer_copies import LayerReader
from kv_store.client import Layout, RowFormat

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


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
        reader = LayerReader(view, device, stage_slabs * SLAB_BYTES)
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
        reader = LayerReader(view, device, 64 * SLAB_BYTES)
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
        assert LayerReader(view, torch.device("cpu")).read(table[0], rows).is_reached
        assert np.array_equal(as_bytes(rows), as_bytes(expected))
        view.close()
