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


@dataclass(frozen=True)
class Packing:
    """A format: how a weight [N, K] is packed, and what files say of it.

    settings: of `quantization_config`. files: more JSON files of the directory.
    """

    pack: Callable[[Tensor], Packed]
    settings: dict[str, object] | None = None
    files: dict[str, dict[str, object]] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)


def e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn)


def spread(blocks: Tensor, rows: int, columns: int, like: Tensor) -> Tensor:
    wide = blocks.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: like.shape[0], : like.shape[1]]


def fp8_rows(shape: tuple[int, ...], *more: str, scale_dtype: torch.dtype = torch.float32) -> object:
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


def fp8_blocks(name: str, rows: int, columns: int, scale_dtype: torch.dtype = torch.float32) -> object:
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
        fp8_rows((1,), "input_scale", "k_scale"), {"quant_method": "fp8", "activation_scheme": "static"}
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
            tensors |= {f"{module}.{name}": tensor.contiguous() for name, tensor in stored.items()}
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
