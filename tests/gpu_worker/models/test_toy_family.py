"""A family that the product does not have: all of it is in this file, composed of the product's blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dense_forward import dense_forward
from engine_rig import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    VOCAB_SIZE,
    Rig,
    random_prompt,
    request,
)
from safetensors.torch import save_file
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.layers import LayerSpec, LinearSpec, MlpSpec, Rank, Source, Split, checkpoint_parts
from gpu_worker.models import Decoder, LoadedModel, ModelConfig, load_model, ungrouped
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.families import FAMILIES
from gpu_worker.models.shape import read_shape

WINDOW = 8
NUM_HEADS, HIDDEN, WIDTH = 2 * NUM_KV_HEADS, 40, 72
FIELDS = {
    "model_type": "toy",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "query_scale": 0.3,
}


def read_toy(fields: ConfigFields) -> ModelConfig:
    """Norms behind the blocks only; an MLP of GELU without a gate; q, k and v in one matrix of the checkpoint; half of
    each head turns, and in every second layer, which may slide, none; a scale and names of its own."""
    shape = read_shape(fields, partial_rotary_factor=0.5, activations=("gelu",))
    plain = shape.attention(output_bias=True)
    rows = tuple(size for source in plain.qkv.sources for size in source.sizes)
    up, down = Source("ffn.fc", (shape.intermediate_size,)), Source("ffn.proj", (shape.hidden_size,))
    layer = LayerSpec(
        shape.eps,
        replace(
            plain,
            qkv=LinearSpec(shape.hidden_size, (Source("attn.qkv", rows),), bias=True),
            scale=fields.number("query_scale", 0.0, 10.0),
        ),
        MlpSpec(
            LinearSpec(shape.hidden_size, (up,), bias=True),
            LinearSpec(shape.intermediate_size, (down,), bias=True, split=Split.COLUMNS),
            "gelu",
        ),
        input_norm=None,
        attention_out_norm="attn_norm",
        mlp_norm=None,
        mlp_out_norm="ffn_norm",
    )
    window = WINDOW if fields.flag("slides", default=False) else None
    second = replace(layer, attention=replace(layer.attention, rope=None, window=window))
    return replace(
        shape.model(layer),
        layers=tuple(second if index % 2 else layer for index in range(shape.num_layers)),
        embedding="toy.tokens.weight",
        layer_prefix="toy.h.",
        final_norm="toy.norm",
        head="toy.head.weight",
    )


def make_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    layer = {
        "attn.qkv.weight": ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN),
        "attn.qkv.bias": ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM,),
        "self_attn.o_proj.weight": (HIDDEN, NUM_HEADS * HEAD_DIM),
        "self_attn.o_proj.bias": (HIDDEN,),
        "attn_norm.weight": (HIDDEN,),
        "ffn.fc.weight": (WIDTH, HIDDEN),
        "ffn.fc.bias": (WIDTH,),
        "ffn.proj.weight": (HIDDEN, WIDTH),
        "ffn.proj.bias": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
    }
    shapes = {"toy.tokens.weight": (VOCAB_SIZE, HIDDEN), "toy.head.weight": (VOCAB_SIZE, HIDDEN)}
    shapes |= {f"toy.h.{index}.{name}": shape for index in range(NUM_LAYERS) for name, shape in layer.items()}
    shapes["toy.norm.weight"] = (HIDDEN,)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = name.endswith("norm.weight")
        tensors[name] = 1 + 0.3 * noise if is_norm else noise / shape[-1] ** 0.5
    # greedy tokens vary where a token's own row counts
    tensors["toy.tokens.weight"] *= 12
    return tensors


def write(directory: Path, tensors: dict[str, Tensor], **changes: object) -> Path:
    (directory / "config.json").write_text(json.dumps(FIELDS | changes))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", read_toy)


def load(directory: Path, device: str = "cpu") -> LoadedModel:
    return load_model(str(directory), device=device, dtype=torch.float32)


def norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turn(heads: Tensor) -> Tensor:
    """heads: [T, H, d], of which the first half of each turns."""
    half = HEAD_DIM // 4
    angles = torch.outer(torch.arange(len(heads)), 10000.0 ** -(torch.arange(half) / half))[:, None]
    left, right, rest = heads.split([half, half, HEAD_DIM - 2 * half], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)


@torch.no_grad()
def reference(tensors: dict[str, Tensor], token_ids: Tensor, window: int | None) -> Tensor:
    """Logits [T, vocab_size], written down in plain PyTorch."""
    distance = torch.arange(len(token_ids))[:, None] - torch.arange(len(token_ids))
    hidden = tensors["toy.tokens.weight"][token_ids]
    for layer in range(NUM_LAYERS):
        of = {name.removeprefix(f"toy.h.{layer}."): tensor for name, tensor in tensors.items()}
        qkv = (hidden @ of["attn.qkv.weight"].T + of["attn.qkv.bias"]).unflatten(1, (-1, HEAD_DIM))
        query, key, value = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        is_seen = distance >= 0
        if layer % 2 == 0:
            query, key = turn(query), turn(key)
        elif window is not None:
            is_seen = is_seen & (distance < window)
        key, value = (part.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for part in (key, value))
        scores = 0.3 * torch.einsum("thd,shd->hts", query, key).masked_fill(~is_seen, float("-inf"))
        attention = torch.einsum("hts,shd->thd", scores.softmax(-1), value).flatten(1)
        output = attention @ of["self_attn.o_proj.weight"].T + of["self_attn.o_proj.bias"]
        hidden = hidden + norm(output, of["attn_norm.weight"])
        inner = F.gelu(hidden @ of["ffn.fc.weight"].T + of["ffn.fc.bias"])
        hidden = hidden + norm(inner @ of["ffn.proj.weight"].T + of["ffn.proj.bias"], of["ffn_norm.weight"])
    return norm(hidden, tensors["toy.norm.weight"]) @ tensors["toy.head.weight"].T


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("slides", [False, True])
def test_logits_equal_a_plain_reference(slides: bool, device: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    tensors, token_ids = make_tensors(), torch.tensor(random_prompt(50))
    model = load(write(tmp_path, tensors, slides=slides), device)
    assert model.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    windows = [layer.window for layer in model.config.attentions]
    assert windows == [WINDOW if slides and index % 2 else None for index in range(NUM_LAYERS)]
    expected = reference(tensors, token_ids, WINDOW if slides else None)
    assert expected.std() > 0.3
    for each in (model, ungrouped(model)):
        found = dense_forward(each.decoder, token_ids.to(device)).cpu()
        torch.testing.assert_close(found, expected, atol=1e-4 if device == "cpu" else 1e-3, rtol=0)


@pytest.mark.parametrize("policy", ["full", "oracle"])
def test_the_engine_serves_it(policy: str, tmp_path: Path) -> None:
    """oracle: with a budget of all tokens."""
    tensors, prompt = make_tensors(), random_prompt(90)
    model = load(write(tmp_path, tensors))
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + 8:
        token_ids.append(int(reference(tensors, torch.tensor(token_ids), None)[-1].argmax()))
    assert len(set(token_ids[len(prompt) :])) > 2
    assert (
        Rig(model=model).tokens(request("a", policy, prompt=prompt, max_tokens=8)) == token_ids[len(prompt) :]
    )


def test_random_weights_of_it_are_made(tmp_path: Path) -> None:
    directory = write(tmp_path, {})
    model = load_model(str(directory), device="cpu", dtype=torch.float32, load_format="dummy")
    logits = dense_forward(model.decoder, torch.tensor(random_prompt(20)))
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.mark.parametrize("name", ["toy.h.1.attn.qkv.bias", "toy.norm.weight", "toy.head.weight"])
def test_its_tensors_must_all_be_there_and_no_other(name: str, tmp_path: Path) -> None:
    tensors = make_tensors()
    taken = tensors.pop(name)
    with pytest.raises(ModelError, match=f"the weights lack {name}"):
        load(write(tmp_path, tensors))
    with pytest.raises(ModelError, match=rf"the weights have {name}\.more, which"):
        load(write(tmp_path, {**tensors, name: taken, f"{name}.more": taken.clone()}))


def test_its_fields_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="field 'hidden_act' is 'silu'; expected 'gelu'"):
        load(write(tmp_path, {}, hidden_act="silu"))
    with pytest.raises(ModelError, match="field 'query_scale' is 99; expected a number from 0 to 10"):
        load(write(tmp_path, {}, query_scale=99))


def test_layers_of_other_heads_are_refused(tmp_path: Path) -> None:
    config = load(write(tmp_path, make_tensors())).config
    first, *others = config.layers
    odd = replace(first, attention=replace(first.attention, head_dim=2 * HEAD_DIM))
    with pytest.raises(ModelError, match="toy: layers that differ in their heads or scale"):
        replace(config, layers=(odd, *others))


@torch.inference_mode()
def test_ranks_compute_their_heads_and_their_summands(tmp_path: Path) -> None:
    tensors = make_tensors()
    whole = load(write(tmp_path, tensors)).decoder
    ranks = []
    for index in range(2):
        decoder = Decoder(whole.config, torch.device("cpu"), torch.float32, Rank(index, 2))
        parts = checkpoint_parts(decoder)
        assert parts.keys() == tensors.keys()
        for name, (block, _) in parts.items():
            block.load(name, tensors[name])
        ranks.append(decoder)
    hidden, positions = whole.embed(torch.arange(9)), torch.arange(9)
    for layer in range(NUM_LAYERS):
        expected = whole.project_qkv(layer, hidden, positions)
        found = zip(*(rank.project_qkv(layer, hidden, positions) for rank in ranks), strict=True)
        for heads, parts in zip(expected, found, strict=True):
            torch.testing.assert_close(torch.cat(parts, dim=1), heads)
    blocks = [decoder.layers[1] for decoder in (whole, *ranks)]
    outputs = [
        block.attention.output(part)
        for block, part in zip(blocks, (expected[0], *expected[0].chunk(2, dim=1)), strict=True)
    ]
    torch.testing.assert_close(sum(outputs[1:]), outputs[0])
    outputs = [block.mlp.output(hidden) for block in blocks]
    torch.testing.assert_close(sum(outputs[1:]), outputs[0])
