"""Every tensor of a checkpoint is used, known to be needless, or named: none is dropped in silence."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from dense_forward import dense_forward
from gguf_model import write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, make_model, random_token_ids, rival_logits, save_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from gpu_worker.errors import ModelError
from gpu_worker.models import LoadedModel, load_model

TIED = ["qwen2-tied", "llama-3-group4-tied"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENS = random_token_ids(40)


def load(path: Path) -> LoadedModel:
    return load_model(str(path), device="cpu", dtype=torch.float32)


def other_head(embedding: Tensor) -> Tensor:
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(5))
    return noise / embedding.shape[1] ** 0.5


def write(directory: Path, tensors: dict[str, Tensor], num_files: int) -> None:
    """num_files: 1, or shards with their index."""
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    files = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    if num_files == 1:
        files = ["model.safetensors"]
    else:
        weight_map = {name: files[i % num_files] for i, name in enumerate(names)}
        (directory / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::num_files]}, directory / file, {"format": "pt"})


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("name", TIED)
def test_a_head_of_its_own_is_used_though_the_config_ties_it(
    name: str, num_files: int, tmp_path: Path
) -> None:
    tied = rival_logits(save_model(CONFIGS[name](), tmp_path), TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    write(tmp_path, {**tensors, HEAD: other_head(tensors[EMBEDDING])}, num_files)
    expected = rival_logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval().float(), TOKENS)
    assert not torch.equal(expected.argmax(-1), tied.argmax(-1))
    loaded = load(tmp_path)
    torch.testing.assert_close(dense_forward(loaded.decoder, TOKENS), expected, atol=1e-4, rtol=0)
    assert not loaded.config.tie_word_embeddings
    num_parameters = sum(tensor.numel() for tensor in tensors.values()) + tensors[EMBEDDING].numel()
    assert loaded.num_parameters == num_parameters


@pytest.mark.parametrize("name", TIED)
def test_a_copy_of_the_embedding_is_no_head_of_its_own(name: str, tmp_path: Path) -> None:
    expected = rival_logits(save_model(CONFIGS[name](), tmp_path), TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    write(tmp_path, {**tensors, HEAD: tensors[EMBEDDING].clone()}, 1)
    loaded = load(tmp_path)
    assert loaded.decoder.head is loaded.decoder.embedding
    torch.testing.assert_close(dense_forward(loaded.decoder, TOKENS), expected, atol=1e-4, rtol=0)


def test_a_head_that_differs_in_one_bit_is_its_own(tmp_path: Path) -> None:
    save_model(CONFIGS["qwen2-tied"](), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors[EMBEDDING].clone()
    head.view(torch.int32)[-1, -1] ^= 1
    write(tmp_path, {**tensors, HEAD: head}, 1)
    assert torch.equal(load(tmp_path).decoder.head.weight, head)


def test_a_tied_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_model(CONFIGS["qwen2-tied"](), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    write(tmp_path, {**tensors, HEAD: torch.ones(3, 4)}, 1)
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \[3, 4\]"):
        load(tmp_path)


@pytest.mark.parametrize("is_own", [True, False])
def test_the_head_of_a_gguf_file_is_used_where_it_has_one(is_own: bool, tmp_path: Path) -> None:
    rival = make_model(
        type(config := CONFIGS["qwen3"]())(**config.to_dict() | {"tie_word_embeddings": False})
    )
    if not is_own:
        rival.lm_head.weight.data.copy_(rival.model.embed_tokens.weight)
    loaded = load(write_gguf(rival, tmp_path / "m.gguf"))
    torch.testing.assert_close(
        dense_forward(loaded.decoder, TOKENS), rival_logits(rival, TOKENS), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blk.0.attn_q.bias", r"model\.layers\.0\.self_attn\.q_proj\.bias"),
        ("blk.0.ffn_up.scale", r"model\.layers\.0\.mlp\.up_proj\.scale"),
        ("blk.1.post_attention_norm.weight", r"blk\.1\.post_attention_norm\.weight"),
        ("rope_factors_long.weight", r"rope_factors_long\.weight"),
        ("blk.0", r"blk\.0"),
        ("lm_head.weight", r"output\.weight and lm_head\.weight are both lm_head\.weight"),
    ],
)
def test_a_tensor_of_a_gguf_file_that_the_model_has_no_use_for_is_refused(
    name: str, message: str, tmp_path: Path
) -> None:
    rival = make_model(CONFIGS["mistral"]())
    with pytest.raises(ModelError, match=message):
        load(write_gguf(rival, tmp_path / "m.gguf", extra={name: torch.ones(4)}))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.down_proj.bias",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.2.input_layernorm.weight",
        "lm_head.bias",
        "model.embed_tokens.weight_scale",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
@pytest.mark.parametrize("place", ["one file", "shards", "a shard, but not in the index"])
def test_a_tensor_that_the_model_has_no_use_for_is_refused(name: str, place: str, tmp_path: Path) -> None:
    save_model(CONFIGS["llama-group1"](), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {name: torch.ones(4)}
    if place == "a shard, but not in the index":
        write(tmp_path, tensors, 3)
        shard = tmp_path / "model-00002-of-00003.safetensors"
        save_file({**load_file(shard), **extra}, shard)
    else:
        write(tmp_path, {**tensors, **extra}, 1 if place == "one file" else 3)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert name in str(caught.value)


def test_a_head_that_the_index_does_not_list_is_used(tmp_path: Path) -> None:
    save_model(CONFIGS["qwen2-tied"](), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    write(tmp_path, tensors, 3)
    shard, head = tmp_path / "model-00003-of-00003.safetensors", other_head(tensors[EMBEDDING])
    save_file({**load_file(shard), HEAD: head}, shard)
    assert torch.equal(load(tmp_path).decoder.head.weight, head)


def test_a_tensor_that_two_shards_hold_and_the_index_lists_in_neither_is_refused(tmp_path: Path) -> None:
    save_model(CONFIGS["qwen2-tied"](), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    write(tmp_path, tensors, 3)
    for number in (1, 2):
        shard = tmp_path / f"model-0000{number}-of-00003.safetensors"
        save_file({**load_file(shard), HEAD: number * tensors[EMBEDDING]}, shard)
    with pytest.raises(ModelError, match=r"lm_head\.weight is in two files"):
        load(tmp_path)


def test_weight_files_that_are_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model(CONFIGS["llama-group1"](), tmp_path)
    # The same weights in another format, as some repositories have beside the files.
    save_file({"tok_embeddings.weight": torch.ones(4)}, tmp_path / "consolidated.safetensors")
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
    assert not caplog.messages
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "extra.safetensors")
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
    (message,) = caplog.messages
    assert message == "extra.safetensors is not used: the weights are those of model.safetensors"


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    save_model(CONFIGS["llama-group1"](), tmp_path)
    save_file({"base_model.x.lora_A.weight": torch.ones(4)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors.*merge_and_unload"):
        load(tmp_path)
