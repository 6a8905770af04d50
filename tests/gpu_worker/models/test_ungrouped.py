"""A KV head for each query head: the same model, and selection for each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS, random_token_ids, save_model

from gpu_worker.kernels.prefill_attention import attend_chunk_naive
from gpu_worker.models import LoadedModel, load_model
from gpu_worker.models.ungrouped import ungrouped

NANO = Path(__file__).resolve().parents[3] / "models" / "carrel-nano"


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load_model(str(NANO), device="cpu", dtype=torch.float32)


@torch.inference_mode()
def logits(model: LoadedModel, token_ids: torch.Tensor) -> torch.Tensor:
    decoder = model.decoder
    hidden, positions = decoder.embed(token_ids), torch.arange(len(token_ids))
    for layer in range(model.config.num_layers):
        query, key, value = decoder.project_qkv(layer, hidden, positions)
        rows = torch.cat([key, value], dim=-1).transpose(0, 1)
        hidden = decoder.finish_layer(
            layer, hidden, attend_chunk_naive(query, rows, 0, decoder.attention_scale)
        )
    return decoder.logits(hidden)


def test_the_function_stays_and_every_query_head_has_its_own_kv(nano: LoadedModel) -> None:
    wide = ungrouped(nano)
    assert (wide.config.num_heads, wide.config.num_kv_heads) == (nano.config.num_heads,) * 2
    token_ids = torch.randint(0, nano.config.vocab_size, (40,), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(logits(wide, token_ids), logits(nano, token_ids), atol=1e-4, rtol=1e-4)
    assert wide.num_parameters > nano.num_parameters
    _, key, _ = wide.decoder.project_qkv(0, wide.decoder.embed(token_ids), torch.arange(40))
    _, shared, _ = nano.decoder.project_qkv(0, nano.decoder.embed(token_ids), torch.arange(40))
    torch.testing.assert_close(key, shared.repeat_interleave(nano.config.group_size, dim=1))


@pytest.mark.parametrize("name", ["phi3", "ministral3", "hunyuan_v1_dense", "olmo2"])
def test_every_kind_of_projection_is_widened(name: str, tmp_path: Path) -> None:
    save_model(CONFIGS[name](), tmp_path)
    model, token_ids = load_model(str(tmp_path), device="cpu", dtype=torch.float32), random_token_ids(40)
    wide = ungrouped(model)
    assert wide.config.num_kv_heads == model.config.num_heads
    torch.testing.assert_close(logits(wide, token_ids), logits(model, token_ids), atol=1e-4, rtol=1e-4)


def test_other_weights_are_the_same_memory(nano: LoadedModel) -> None:
    wide = ungrouped(nano)
    assert wide.decoder.embedding.weight.data_ptr() == nano.decoder.embedding.weight.data_ptr()
    ours, theirs = dict(wide.decoder.named_parameters()), dict(nano.decoder.named_parameters())
    assert ours.keys() == theirs.keys()
    shared = [name for name in ours if ours[name].data_ptr() == theirs[name].data_ptr()]
    assert sorted(set(ours) - set(shared)) == sorted(name for name in ours if "qkv" in name)
    assert all(parameter.device.type == "cpu" for parameter in wide.decoder.parameters())


def test_a_model_without_groups_is_as_it_is(nano: LoadedModel) -> None:
    wide = ungrouped(nano)
    assert ungrouped(wide) is wide
