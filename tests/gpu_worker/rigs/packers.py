"""Checkpoints in quantised formats, packed by the formats' formulas, each with the plain values that it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, save_model
from torch import Tensor

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2}
SIZES["head_dim"] = 32
# A module's tensors by their names after the module's, and the values that they stand for.
Packed = tuple[dict[str, Tensor], Tensor]
Pack = Callable[[Tensor], Packed]


@dataclass(frozen=True)
class Packing:
    """A format: how a weight [N, K] is packed, and what files say of it.

    settings: of `quantization_config`. files: more JSON files of the directory.
    """

    pack: Pack
    settings: dict[str, object] | None = None
    files: dict[str, dict[str, object]] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)


def e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn)


def spread(blocks: Tensor, rows: int, columns: int, like: Tensor) -> Tensor:
    wide = blocks.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: like.shape[0], : like.shape[1]]


def fp8_rows(shape: tuple[int, ...], *more: str, scale_dtype: torch.dtype = torch.float32) -> Pack:
    """A scale for each row, or for all (shape (), (1,)); -1 stands for the number of rows. more: tensors of one number
    that are not needed."""

    def pack(weight: Tensor) -> Packed:
        of = weight.abs().amax(dim=1) if -1 in shape else weight.abs().amax()[None]
        scales = (of / 448).to(scale_dtype)
        codes = e4m3(weight / scales.float()[:, None])
        stored = scales.reshape([len(weight) if size == -1 else size for size in shape])
        tensors = {"weight": codes, "weight_scale": stored} | {name: torch.tensor(0.5) for name in more}
        return tensors, codes.float() * scales.float()[:, None]

    return pack


def fp8_blocks(name: str, rows: int, columns: int, scale_dtype: torch.dtype = torch.float32) -> Pack:
    def pack(weight: Tensor) -> Packed:
        size = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        padded = torch.zeros(size[0] * rows, size[1] * columns)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scales = padded.view(size[0], rows, size[1], columns).abs().amax(dim=(1, 3)) / 448
        if scale_dtype is torch.float8_e8m0fnu:
            scales = scales.log2().ceil().exp2()
        scales = scales.to(scale_dtype)
        wide = spread(scales, rows, columns, weight)
        codes = e4m3(weight / wide)
        return {"weight": codes, name: scales}, codes.float() * wide

    return pack


def in_groups(strategy: str, **weights: object) -> dict[str, object]:
    """Settings of compressed-tensors."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": strategy, **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


FP8: dict[str, Packing] = {
    "fp8-tensor": Packing(fp8_rows(()), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8-static": Packing(
        fp8_rows((1,), "input_scale", "activation_scale", "k_scale"),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fp8-block": Packing(
        fp8_blocks("weight_scale_inv", 128, 128), {"quant_method": "fp8", "weight_block_size": [128, 128]}
    ),
    "fp8-block-exponents": Packing(
        fp8_blocks("weight_scale_inv", 128, 128, torch.float8_e8m0fnu), {"quant_method": "fp8"}
    ),
    "fbgemm": Packing(fp8_rows((-1, 1), "input_scale_ub"), {"quant_method": "fbgemm_fp8"}),
    "modelopt": Packing(
        fp8_rows((), "input_scale"), files={"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}}
    ),
    "modelopt-config": Packing(
        fp8_rows((), "input_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}
    ),
    "compressed-channel": Packing(fp8_rows((-1, 1), scale_dtype=torch.bfloat16), in_groups("channel")),
    "compressed-tensor": Packing(fp8_rows((1,)), config={"compression_config": in_groups("tensor")}),
    "compressed-block": Packing(
        fp8_blocks("weight_scale", 64, 32), in_groups("block", block_structure=[64, 32])
    ),
    "unsaid": Packing(fp8_rows((-1,))),
}


def words_of(numbers: Tensor, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Numbers from 0 to 15 [R, C] as int32 words [R, C / 8]; nibble i of a word is its column places[i]."""
    parts = numbers.long().unflatten(1, (-1, 8))
    words = sum(parts[:, :, place] << 4 * nibble for nibble, place in enumerate(places))
    assert isinstance(words, Tensor)
    return (words - (words >= 2**31).long() * 2**32).to(torch.int32)


def in_groups_of(weight: Tensor, group_of: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers from 0 to 15 [N, K], float16 scales [N, G] and zeros [N, G]; group_of: of each column."""
    num_groups = int(group_of.max()) + 1
    groups = [weight[:, group_of == group] for group in range(num_groups)]
    low = torch.stack([each.amin(1).clamp(max=0) for each in groups], 1)
    high = torch.stack([each.amax(1).clamp(min=0) for each in groups], 1)
    if symmetric:
        scales, zeros = (torch.maximum(high / 7, -low / 8)).half(), torch.full_like(low, 8)
    else:
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
    numbers = (weight / scales.float()[:, group_of] + zeros[:, group_of]).round().clamp(0, 15)
    return numbers, scales, zeros


def values_of(numbers: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    return (numbers - zeros[:, group_of]) * scales.float()[:, group_of]


def groups_of(num_columns: int, group: int, shuffled: bool = False) -> Tensor:
    """The group of each column."""
    groups = torch.arange(num_columns) // (num_columns if group == -1 else group)
    return (
        groups[torch.randperm(num_columns, generator=torch.Generator().manual_seed(3))]
        if shuffled
        else groups
    )


def awq(group: int) -> Pack:
    places = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(weight: Tensor) -> Packed:
        group_of = groups_of(weight.shape[1], group)
        numbers, scales, zeros = in_groups_of(weight, group_of, symmetric=False)
        tensors = {"qweight": words_of(numbers.T, places), "qzeros": words_of(zeros.T, places)}
        return tensors | {"scales": scales.T}, values_of(numbers, scales, zeros, group_of)

    return pack


def gptq(group: int, symmetric: bool, shuffled: bool = False, shift: int = 1, has_g_idx: bool = True) -> Pack:
    def pack(weight: Tensor) -> Packed:
        group_of = groups_of(weight.shape[1], group, shuffled)
        numbers, scales, zeros = in_groups_of(weight, group_of, symmetric)
        # a stored zero has 4 bits
        zeros = zeros.clamp(min=shift)
        tensors = {"qweight": words_of(numbers).T, "qzeros": words_of((zeros - shift).T), "scales": scales.T}
        if has_g_idx:
            tensors["g_idx"] = group_of.int()
        return tensors, values_of(numbers, scales, zeros, group_of)

    return pack


def pack_quantized(group: int, symmetric: bool, shuffled: bool = False) -> Pack:
    def pack(weight: Tensor) -> Packed:
        group_of = groups_of(weight.shape[1], group, shuffled)
        numbers, scales, zeros = in_groups_of(weight, group_of, symmetric)
        scales = scales.bfloat16()
        tensors = {"weight_packed": words_of(numbers), "weight_scale": scales}
        tensors["weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            tensors["weight_zero_point"] = words_of(zeros.T).T
        if shuffled:
            tensors["weight_g_idx"] = group_of.int()
        return tensors, values_of(numbers, scales, zeros, group_of)

    return pack


def in_4_bits(**weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }


INT4: dict[str, Packing] = {
    "awq-128": Packing(
        awq(128), {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
    ),
    "awq-32-file": Packing(
        awq(32), files={"quant_config.json": {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}}
    ),
    "gptq-128-sym": Packing(
        gptq(128, True),
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    ),
    "gptq-64-asym": Packing(
        gptq(64, False, has_g_idx=False), {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}
    ),
    "gptq-order": Packing(
        gptq(128, True, shuffled=True),
        files={"quantize_config.json": {"bits": 4, "group_size": 128, "sym": True, "desc_act": True}},
    ),
    "gptq-v2": Packing(
        gptq(128, False, shift=0),
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-all-columns": Packing(gptq(-1, True), {"quant_method": "gptq", "bits": 4, "group_size": -1}),
    "w4a16-128": Packing(pack_quantized(128, True), in_4_bits(group_size=128)),
    "w4a16-32-asym": Packing(
        pack_quantized(32, False), config={"compression_config": in_4_bits(group_size=32)}
    ),
    "w4a16-order": Packing(
        pack_quantized(128, True, shuffled=True), in_4_bits(group_size=128, actorder="group")
    ),
    "awq-unsaid": Packing(awq(64)),
    "gptq-unsaid": Packing(gptq(32, False, shuffled=True)),
}


def nf4(block: int, nested: bool = False) -> Pack:
    codebook = torch.linspace(-1, 1, 16).sign() * torch.linspace(-1, 1, 16).square()

    def pack(weight: Tensor) -> Packed:
        blocks = weight.flatten().view(-1, block)
        absmax = blocks.abs().amax(1)
        state: dict[str, object] = {"blocksize": block, "shape": list(weight.shape), "dtype": "bfloat16"}
        tensors = {"weight.quant_map": codebook}
        if nested:
            steps, offset = torch.linspace(-1, 1, 256), float(absmax.mean())
            of_scales = torch.stack([each.abs().amax() for each in (absmax - offset).split(256)])
            wide = of_scales.repeat_interleave(256)[: len(absmax)]
            places = ((absmax - offset) / wide)[:, None].sub(steps).abs().argmin(1)
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            tensors |= {"weight.absmax": places.byte(), "weight.nested_absmax": of_scales}
            tensors["weight.nested_quant_map"] = steps
            absmax = steps[places] * wide + offset
        else:
            tensors["weight.absmax"] = absmax
        numbers = (blocks / absmax[:, None])[..., None].sub(codebook).abs().argmin(2)
        pairs = numbers.flatten().view(-1, 2)
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors |= {"weight": (pairs[:, :1] << 4 | pairs[:, 1:]).byte()}
        tensors["weight.quant_state.bitsandbytes__nf4"] = text
        return tensors, (codebook[numbers] * absmax[:, None]).view(weight.shape)

    return pack


CODEBOOKS: dict[str, Packing] = {
    "nf4": Packing(nf4(64), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nf4-nested": Packing(nf4(64, nested=True), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nf4-unsaid": Packing(nf4(128)),
}


def projections(tensors: dict[str, Tensor]) -> list[str]:
    """Modules of the layers' projections."""
    return [
        name.removesuffix(".weight")
        for name in tensors
        if ".layers." in name and name.endswith("_proj.weight")
    ]


def write_packed(
    packing: Packing, directory: Path, base: str = "llama-linear-biases", plain: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
) -> tuple[Path, Path]:  # fmt: skip
    """Return directories of a packed model and of its plain twin.

    plain: ends of modules that stay as they are. also: modules other than the layers' that are packed.
    """
    config = CONFIGS[base]()
    config = type(config)(**config.to_dict() | SIZES)
    folders = directory / "packed", directory / "twin"
    for folder in folders:
        save_model(config, folder)
    tensors = load_file(folders[0] / "model.safetensors")
    twin = dict(tensors)
    for module in [*projections(tensors), *also]:
        if not module.endswith(plain or "-"):
            stored, values = packing.pack(tensors.pop(f"{module}.weight"))
            tensors |= {f"{module}.{name}": tensor.contiguous().clone() for name, tensor in stored.items()}
            twin[f"{module}.weight"] = values.contiguous()
    save_file(tensors, folders[0] / "model.safetensors", {"format": "pt"})
    save_file(twin, folders[1] / "model.safetensors", {"format": "pt"})
    said = dict(packing.config)
    if packing.settings is not None:
        said["quantization_config"] = packing.settings
    fields = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(fields | said))
    for name, content in packing.files.items():
        (folders[0] / name).write_text(json.dumps(content))
    return folders
