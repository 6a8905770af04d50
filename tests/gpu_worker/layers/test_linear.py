"""A projection: its formats, the checkpoint's tensors that it loads, and each rank's shard of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_forward import dense_forward
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, random_token_ids, save_model
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.layers import (
    Linear,
    LinearSpec,
    Matrix,
    Part,
    Piece,
    Rank,
    Source,
    Split,
    StoredMatrix,
    Target,
    WeightFormat,
)
from gpu_worker.models import ModelConfig, load_model
from gpu_worker.models.config_fields import ConfigFields
from gpu_worker.models.families import FAMILIES
from gpu_worker.models.llama import read_llama

CPU = torch.device("cpu")
FUSED = LinearSpec(6, (Source("a", (8,)), Source("b", (4, 4))), bias=True)
SUMMED = LinearSpec(8, (Source("out", (5,)),), bias=True, split=Split.COLUMNS)
INPUTS = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def checkpoint(spec: LinearSpec) -> dict[str, Tensor]:
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, sizes in spec.sources:
        tensors[f"{name}.weight"] = torch.randn(sum(sizes), spec.num_inputs, generator=generator)
        tensors[f"{name}.bias"] = torch.randn(sum(sizes), generator=generator)
    return tensors


def loaded(spec: LinearSpec, rank: Rank, tensors: dict[str, Tensor]) -> Linear:
    linear = Linear(spec, "", Target(CPU, torch.float32, rank))
    assert {name: part.shape for name, part in linear.parts().items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        linear.load(name, tensor)
    return linear


@pytest.mark.parametrize("count", [1, 2, 4])
def test_ranks_that_divide_rows_compute_their_part_of_every_output(count: int) -> None:
    tensors, inputs = checkpoint(FUSED), INPUTS[:, :6]
    parts = [loaded(FUSED, Rank(index, count), tensors).matmul(inputs) for index in range(count)]
    begins = 0
    for size, name, rows in ((8, "a", slice(0, 8)), (4, "b", slice(0, 4)), (4, "b", slice(4, 8))):
        whole = inputs @ tensors[f"{name}.weight"][rows].T + tensors[f"{name}.bias"][rows]
        share = size // count
        found = torch.cat([part[:, begins : begins + share] for part in parts], dim=1)
        torch.testing.assert_close(found, whole)
        begins += share


@pytest.mark.parametrize("count", [1, 2, 4])
def test_outputs_of_ranks_that_divide_columns_add_up(count: int) -> None:
    tensors = checkpoint(SUMMED)
    whole = INPUTS @ tensors["out.weight"].T + tensors["out.bias"]
    for is_onto in (False, True):
        total = torch.zeros_like(whole)
        for index in range(count):
            linear, share = loaded(SUMMED, Rank(index, count), tensors), 8 // count
            inputs = INPUTS[:, index * share : (index + 1) * share]
            total = linear.matmul_onto(total, inputs) if is_onto else total + linear.matmul(inputs)
        torch.testing.assert_close(total, whole)


@pytest.mark.parametrize(("spec", "named"), [(FUSED, "8 outputs of a"), (SUMMED, "8 inputs of out")])
def test_what_ranks_cannot_divide_is_refused(spec: LinearSpec, named: str) -> None:
    with pytest.raises(ModelError, match=f"{named} cannot be divided among 3 ranks"):
        Linear(spec, "", Target(CPU, torch.float32, Rank(0, 3)))


class BytesMatrix(Matrix):
    """Rows of int8, with a scale each."""

    def __init__(self, num_rows: int, num_columns: int, target: Target) -> None:
        super().__init__()
        empty = torch.empty(num_rows, num_columns, dtype=torch.int8, device=target.device)
        self.codes = torch.nn.Parameter(empty, requires_grad=False)
        self.scales = target.empty(num_rows, 1)

    def load(self, stored: StoredMatrix, piece: Piece) -> None:
        self.codes[piece.target].copy_(stored.codes[piece.rows, piece.columns])
        assert stored.scales is not None
        self.scales[piece.target].copy_(stored.scales[piece.rows])

    def fill(self, generator: torch.Generator) -> None:
        raise NotImplementedError

    def matmul(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(inputs, self.codes * self.scales, bias)


class Bytes(WeightFormat):
    """A format that the product does not have."""

    def parts(self, name: str, shape: tuple[int, int]) -> dict[str, Part]:
        scale = Part("scales", (shape[0], 1))
        return {f"{name}.weight": Part("codes", shape, ("I8",)), f"{name}.weight_scale": scale}

    def read(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], device: torch.device
    ) -> StoredMatrix:
        return StoredMatrix(tensors["codes"], tensors["scales"])

    def matrix(self, num_rows: int, num_columns: int, target: Target) -> Matrix:
        return BytesMatrix(num_rows, num_columns, target)


BYTES = Bytes()


def as_bytes(tensors: dict[str, Tensor], names: set[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors with these weights in `Bytes`, and with the weights that those stand for."""
    packed, plain = dict(tensors), dict(tensors)
    for name in names:
        scales = tensors[name].abs().amax(dim=1, keepdim=True) / 127
        packed[name] = (tensors[name] / scales).round().to(torch.int8)
        packed[f"{name}_scale"] = scales
        plain[name] = packed[name] * scales
    return packed, plain


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("split", list(Split))
def test_a_format_of_a_test_is_loaded_and_multiplied_by_shards(split: Split, index: int) -> None:
    sources, rank = (Source("a", (8,)), Source("b", (4, 4))), Rank(index, 2)
    plain_spec = LinearSpec(8, sources, True, split)
    packed, plain = as_bytes(checkpoint(plain_spec), {"a.weight", "b.weight"})
    linear = loaded(LinearSpec(8, sources, True, split, BYTES), rank, packed)
    twin = loaded(plain_spec, rank, plain)
    inputs = INPUTS if split is Split.ROWS else INPUTS[:, :4]
    torch.testing.assert_close(linear.matmul(inputs), twin.matmul(inputs))
    total = torch.ones_like(twin.matmul(inputs))
    torch.testing.assert_close(
        linear.matmul_onto(total.clone(), inputs), twin.matmul_onto(total.clone(), inputs)
    )


def read_packed(fields: ConfigFields) -> ModelConfig:
    """A Llama whose MLPs are stored in `Bytes`."""
    config = read_llama(fields)
    (mlp,) = {layer.mlp for layer in config.layers}
    packed = replace(mlp, up=replace(mlp.up, format=BYTES), down=replace(mlp.down, format=BYTES))
    return replace(config, layers=tuple(replace(layer, mlp=packed) for layer in config.layers))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("split", list(Split))
def test_a_matrix_of_several_formats_is_held_plain(split: Split, index: int) -> None:
    """formats: by the names of modules, which the target has."""
    spec, rank = LinearSpec(8, (Source("a", (8,)), Source("b", (4, 4))), split=split), Rank(index, 2)
    tensors = {name: each for name, each in checkpoint(spec).items() if name.endswith("weight")}
    packed, plain = as_bytes(tensors, {"b.weight"})
    found = []
    for given, formats in (packed, {"b": BYTES}), (plain, {}):
        linear = Linear(spec, "", Target(CPU, torch.float32, rank, formats))
        for name in sorted(given, reverse=True):
            linear.load(name, given[name])
        found.append(linear.matmul(INPUTS if split is Split.ROWS else INPUTS[:, :4]))
    torch.testing.assert_close(*found)


def test_a_checkpoint_in_a_format_of_a_test_is_loaded_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(CONFIGS["llama-linear-biases"](), tmp_path)
    file, token_ids = tmp_path / "model.safetensors", random_token_ids(20)
    tensors = load_file(file)
    names = {name for name in tensors if ".mlp." in name and name.endswith("weight")}
    packed, plain = as_bytes(tensors, names)

    def logits() -> Tensor:
        model = load_model(str(tmp_path), device="cpu", dtype=torch.float32)
        return dense_forward(model.decoder, token_ids)

    save_file(plain, file)
    expected = logits()
    monkeypatch.setitem(FAMILIES, "llama", read_packed)
    with pytest.raises(ModelError, match=r"the weights lack .*weight_scale"):
        logits()
    save_file(packed, file)
    torch.testing.assert_close(logits(), expected, atol=1e-4, rtol=0)
    save_file({**plain, **{name: packed[name] for name in packed.keys() - plain.keys()}}, file)
    with pytest.raises(ModelError, match="is of type F32"):
        logits()
