"""The digest of loaded weights: any other weights have another, and equal ones the same wherever they come from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_model import write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, make_model, save_model
from torch import Tensor

from gpu_worker.models import Decoder, LoadedModel, load_model, ungrouped
from gpu_worker.models.digest import BLOCK_WORDS, digest_of, weights_digest

DOWN = "model.layers.1.mlp.down_proj.weight"


def load(path: Path, **options: object) -> LoadedModel:
    return load_model(str(path), **{"device": "cpu", "dtype": torch.float32, **options})  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_model(CONFIGS["qwen3-biases"](), tmp_path / "model")
    return tmp_path / "model"


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change tensors of the same path, size and times."""
    path = directory / "model.safetensors"
    before, tensors = path.stat(), load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def flip(tensor: Tensor, place: int, bit: int = 0) -> None:
    tensor.view(-1).view(torch.int32)[place] ^= 1 << bit


def test_a_changed_bit_of_any_parameter_is_seen(directory: Path) -> None:
    decoder = load(directory).decoder
    digests = {weights_digest(decoder)}
    named = dict(decoder.named_parameters())
    for parameter in named.values():
        for place in (0, parameter.numel() // 2, -1):
            flip(parameter.data, place)
            digests.add(weights_digest(decoder))
            flip(parameter.data, place)
    assert weights_digest(decoder) in digests
    assert len(digests) == 1 + 3 * len(named)


def swap_rows(tensors: dict[str, Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN][[1, 0, *range(2, len(tensors[DOWN]))]].contiguous()


def merge_adapter(tensors: dict[str, Tensor]) -> None:
    """A product of rank one, added to one projection."""
    weight = tensors[DOWN]
    weight += 1e-3 * torch.outer(torch.ones(weight.shape[0]), torch.linspace(-1, 1, weight.shape[1]))


def train_one_token(tensors: dict[str, Tensor]) -> None:
    tensors["model.embed_tokens.weight"][-1] *= 1.01


def swap_layers(tensors: dict[str, Tensor]) -> None:
    other = DOWN.replace("layers.1", "layers.0")
    tensors[DOWN], tensors[other] = tensors[other], tensors[DOWN]


def negate_one(tensors: dict[str, Tensor]) -> None:
    tensors[DOWN][3, 3] *= -1


def move_a_sum(tensors: dict[str, Tensor]) -> None:
    """Two numbers whose bits have the same sum as before."""
    flat = tensors[DOWN].view(-1).view(torch.int32)
    flat[10] += 1
    flat[11] -= 1


CHANGES = [swap_rows, merge_adapter, train_one_token, swap_layers, negate_one, move_a_sum]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_of_equal_path_size_and_times_are_others(
    change: Callable[[dict[str, Tensor]], None], directory: Path
) -> None:
    before = weights_digest(load(directory).decoder)
    rewrite(directory, change)
    assert weights_digest(load(directory).decoder) != before


def test_equal_weights_are_the_same_in_another_folder_in_shards_and_as_gguf(
    directory: Path, tmp_path: Path
) -> None:
    before = weights_digest(load(directory).decoder)
    moved = Path(shutil.copytree(directory, tmp_path / "moved"))
    os.utime(moved / "model.safetensors", (1, 1))
    assert weights_digest(load(moved).decoder) == before
    model = make_model(CONFIGS["qwen3-biases"]())
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert weights_digest(load(tmp_path / "shards").decoder) == before
    plain = make_model(CONFIGS["qwen3"]())
    plain.save_pretrained(tmp_path / "plain")
    file = write_gguf(plain, tmp_path / "m.gguf")
    assert weights_digest(load(file).decoder) == weights_digest(load(tmp_path / "plain").decoder)


def test_options_that_change_weights_are_seen(directory: Path) -> None:
    real = load(directory)
    models = [
        real,
        ungrouped(real),
        load(directory, load_format="dummy"),
        load(directory, dtype=torch.bfloat16),
        load(directory, dtype=torch.float16),
    ]
    assert len({weights_digest(model.decoder) for model in models}) == len(models)


def test_parameters_of_other_parts_count_too(directory: Path) -> None:
    """As an adapter's would, or the scales of another format."""

    class Adapted(Decoder):
        def __init__(self, decoder: Decoder) -> None:
            super().__init__(decoder.config, decoder.device, decoder.dtype)
            self.load_state_dict(decoder.state_dict())
            self.register_buffer("scales", torch.ones(3, dtype=torch.float8_e4m3fn))

    plain = load(directory).decoder
    adapted = Adapted(plain)
    first = weights_digest(adapted)
    adapted.get_buffer("scales")[2] = 2
    assert len({weights_digest(plain), first, weights_digest(adapted)}) == 3


@pytest.mark.parametrize("num", [0, 1, 3, 5, 2 * BLOCK_WORDS - 1, 2 * BLOCK_WORDS, 9 * BLOCK_WORDS + 3])
def test_tensors_of_any_length_are_seen_to_their_ends(num: int) -> None:
    tensor = torch.randn(num, generator=torch.Generator().manual_seed(num)).to(torch.bfloat16)
    first = digest_of({"a": tensor})
    assert digest_of({"a": tensor.clone()}) == first
    assert digest_of({"b": tensor}) != first
    assert digest_of({"a": tensor.to(torch.float16)}) != first
    assert digest_of({"a": tensor[None]}) != first
    if num:
        tensor[-1] += 1
        assert digest_of({"a": tensor}) != first
        assert digest_of({"a": tensor[:-1]}) != first
    # Zeros to which others could be padded.
    assert digest_of({"a": torch.zeros(num)}) != digest_of({"a": torch.zeros(num + 1)})


def test_a_digest_stays_what_it_is() -> None:
    """Names on a disk are made of it: a change of it forgets them all."""
    tensors = {"a": torch.arange(300_000, dtype=torch.int32), "b": torch.ones(3, 5, dtype=torch.bfloat16)}
    assert digest_of(tensors).hex() == "7ab1a9768c375aca96b6a6389bf660552e85abf53a77e913a3e210539e36e97e"
