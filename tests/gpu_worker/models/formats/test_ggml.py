"""Blocks of GGUF files: the numbers that the package `gguf` makes of them, and matrices that stay packed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from dense_forward import dense_forward
from gguf import GGMLQuantizationType as Kind
from gguf_model import write_gguf
from tiny_models import CONFIGS, make_model, random_token_ids, rival_logits
from torch import Tensor
from transformers import PreTrainedModel

from gpu_worker.errors import ModelError
from gpu_worker.layers import Piece, Target, packed
from gpu_worker.layers.packed import PackedWeights
from gpu_worker.models import load_model
from gpu_worker.models.formats.ggml import BLOCK_TYPES, Ggml

CPU, TOKENS = torch.device("cpu"), random_token_ids(40)
SHAPE = 48, 512
# Types whose blocks the package can make.
MADE = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
# Models of the architectures whose files differ in names, and in the order of rows.
ARCHITECTURES = [
    "mistral", "ministral3", "qwen2-tied", "qwen3-biases", "ernie4_5-biases", "granite-tied-biases",
    "smollm3-untied", "arcee-biases", "olmo2", "exaone4", "hunyuan_v1_dense", "seed_oss-biases", "phi3", "glm4",
]  # fmt: skip
# A file does not say which layers have no RoPE: every fourth.
CHANGES: dict[str, dict[str, object]] = {
    "smollm3-untied": {"num_hidden_layers": 4, "no_rope_layers": None, "layer_types": None}
}


def any_blocks(kind: Kind) -> Tensor:
    """Random bytes [N, bytes of a row]; factors, which are 16-bit floats, are small numbers."""
    generator = np.random.default_rng(int(kind))
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (SHAPE[0] * SHAPE[1] // size, num_bytes), dtype=np.uint8)
    places = {Kind.Q6_K: [208], Kind.Q4_0: [0], Kind.Q5_0: [0], Kind.Q8_0: [0]}.get(kind, [0, 2])
    for place in places:
        factors = generator.normal(size=len(blocks)).astype(np.float16) / np.float16(64)
        blocks[:, place : place + 2] = factors[:, None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(SHAPE[0], -1))


@pytest.mark.parametrize("type_id", BLOCK_TYPES)
def test_values_are_those_of_the_package(type_id: int) -> None:
    kind, raw = Kind(type_id), any_blocks(Kind(type_id))
    assert (BLOCK_TYPES[type_id].size, BLOCK_TYPES[type_id].num_bytes) == gguf.GGML_QUANT_SIZES[kind]
    expected = torch.from_numpy(gguf.dequantize(raw.numpy(), kind))
    assert expected.std() > 0.01
    # to the bit: names of known prefixes are made of values
    assert torch.equal(Ggml(type_id).read({"rows": raw}, SHAPE, CPU).values(), expected)


@pytest.mark.parametrize("type_id", BLOCK_TYPES)
def test_packed_matrices_have_their_values(type_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PACKING_DEVICES", ("cpu",))
    stored = Ggml(type_id).read({"rows": any_blocks(Kind(type_id))}, SHAPE, CPU)
    matrix = Ggml(type_id).matrix(*SHAPE, Target(CPU, torch.bfloat16))
    matrix.load(stored, Piece(slice(0, SHAPE[0]), slice(0, SHAPE[1]), 0))
    assert isinstance(matrix, PackedWeights)
    # scales are rounded to 16 bits
    found = packed.unpack_rows(matrix.packed, 0, SHAPE[0], torch.float32)
    torch.testing.assert_close(
        found, stored.values(), rtol=0, atol=1e-3 * float(stored.values().abs().amax())
    )


def write(path: Path, base: str, kind: Kind) -> PreTrainedModel:
    """Write a file. Return the model that it was made of, with the file's values."""
    config = CONFIGS[base]()
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 32}
    sizes["num_key_value_heads"] = 2
    changes = sizes | CHANGES.get(base, {})
    model = make_model(type(config)(**config.to_dict() | changes))
    write_gguf(model, path, kind)
    return model


@pytest.mark.parametrize(
    ("base", "kind"),
    [*(("llama-group1", kind) for kind in MADE), *((base, Kind.Q8_0) for base in ARCHITECTURES)],
)
def test_a_file_stays_packed_and_is_as_good_as_its_values(
    base: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = write(tmp_path / "m.gguf", base, kind)

    def log_probs(dtype: torch.dtype) -> Tensor:
        model = load_model(str(tmp_path / "m.gguf"), device="cpu", dtype=dtype)
        assert bool(model.decoder.packed_kinds) == (
            dtype == torch.bfloat16 and "cpu" in packed.PACKING_DEVICES
        )
        return dense_forward(model.decoder, TOKENS).log_softmax(-1)

    exact = rival_logits(rival, TOKENS).log_softmax(-1)
    torch.testing.assert_close(log_probs(torch.float32), exact, atol=1e-4, rtol=0)
    usual = (log_probs(torch.bfloat16) - exact).square().mean().sqrt()
    monkeypatch.setattr(packed, "PACKING_DEVICES", ("cpu",))
    assert (log_probs(torch.bfloat16) - exact).square().mean().sqrt() < 1.5 * usual


@pytest.mark.parametrize("devices", [("cpu",), ("cuda",)], ids=["packed", "plain"])
@pytest.mark.parametrize(("kind", "factor"), [(Kind.Q8_0, 0), (Kind.Q4_1, 0), (Kind.Q4_1, 2)])
def test_a_scale_that_is_not_finite_is_named(
    kind: Kind, factor: int, devices: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "PACKING_DEVICES", devices)
    write(path := tmp_path / "m.gguf", "llama-group1", kind)
    tensor = next(each for each in gguf.GGUFReader(path).tensors if each.name == "blk.1.attn_output.weight")
    begin, content = tensor.data_offset + factor, bytearray(path.read_bytes())
    content[begin : begin + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.o_proj\.weight, .* not finite in bfloat16"):
        load_model(str(path), device="cpu", dtype=torch.bfloat16)


def test_projections_of_several_types_are_held_in_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in usual files, which have values in more bits than queries and keys."""
    monkeypatch.setattr(packed, "PACKING_DEVICES", ("cpu",))
    sources = [Ggml(int(kind)) for kind in (Kind.Q4_K, Kind.Q4_0, Kind.Q6_K, Kind.Q5_1)]
    size = len(sources) * SHAPE[0], SHAPE[1]
    matrix = packed.hold([each.holding for each in sources], size, Target(CPU, torch.bfloat16))
    assert isinstance(matrix, PackedWeights)
    values = []
    for place, each in enumerate(sources):
        stored = each.read({"rows": any_blocks(Kind(each.type_id))}, SHAPE, CPU)
        matrix.load(stored, Piece(slice(0, SHAPE[0]), slice(0, SHAPE[1]), place * SHAPE[0]))
        values.append(stored.values())
    found, expected = packed.unpack_rows(matrix.packed, 0, size[0], torch.float32), torch.cat(values)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.abs().amax()))
