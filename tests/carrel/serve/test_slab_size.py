"""The default size of a slab, for models of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest

from carrel.serve.model import BUNDLED
from carrel.serve.slab_size import default_slab_bytes
from kv_store.client import Layout, RowFormat
from kv_store.client.layout import SlabGeometry

KIB, MIB = 1 << 10, 1 << 20
LLAMA_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (LLAMA_8B, 2 * MIB),
        ({**LLAMA_8B, "head_dim": 64}, MIB),
        # without groups of heads
        ({"hidden_size": 512, "num_attention_heads": 8}, MIB),
        # of 70B, and of 1 head: at most the default, at least what a store takes
        ({"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 64}, 2 * MIB),
        ({"hidden_size": 2, "num_attention_heads": 1}, 4 * KIB),
        # SmolLM2-135M: 512 tokens fill 384 KiB, so that a slab has 256 of them
        ({"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}, 256 * KIB),
        ({"text_config": {**LLAMA_8B, "head_dim": 64}, "hidden_size": 1}, MIB),
        # what cannot be read is left to the worker
        ({}, 2 * MIB),
        ([], 2 * MIB),
        ({**LLAMA_8B, "head_dim": "64"}, 2 * MIB),
        ({**LLAMA_8B, "head_dim": 1 << 20}, 2 * MIB),
        ({**LLAMA_8B, "num_attention_heads": 0}, 2 * MIB),
    ],
)
def test_a_slab_has_at_most_512_tokens(fields: Any, expected: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert default_slab_bytes(str(tmp_path)) == expected


def test_a_slab_of_the_bundled_model() -> None:
    for element, num_tokens in (("bf16", 512), ("fp32", 256)):
        geometry = SlabGeometry(Layout(8, 2, RowFormat(64, element)), default_slab_bytes(str(BUNDLED)))
        assert geometry.tokens_per_slab == num_tokens


def test_a_gguf_file_has_its_own_names(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(576)
    writer.add_head_count(9)
    writer.add_head_count_kv(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert default_slab_bytes(str(path)) == 256 * KIB


def test_a_model_of_the_hub_is_read_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(model: str, name: str, revision: str | None) -> str:
        if (model, revision) != ("owner/name", "main"):
            raise OSError("offline")
        (tmp_path / name).write_text(json.dumps({**LLAMA_8B, "head_dim": 64}))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert default_slab_bytes("owner/name", "main") == MIB
    assert default_slab_bytes("owner/other") == 2 * MIB
