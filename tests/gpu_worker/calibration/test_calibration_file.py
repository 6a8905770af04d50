"""The file of a calibration: what is written is read, and what is not of this model is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_rig import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, SHAPE, llama_config, make_model
from safetensors.torch import load_file, save_file

from gpu_worker.calibration import ModelFacts, Observation, read_calibration, write_calibration
from gpu_worker.errors import ConfigError
from gpu_worker.policies.base import CacheShape
from gpu_worker.policies.chelsea.policy import Chelsea
from kv_store.client import RowFormat

FACTS = ModelFacts.of(make_model().config)
SCORES = torch.tensor([[0.1, 0.9], [0.2, 0.3], [0.8, 0.0]])
SKEW = torch.randn(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(0))
OBSERVATION = Observation(SCORES, SKEW)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.safetensors"
    write_calibration(path, FACTS, OBSERVATION, {"model": "some-model", "num_tokens": "4096"})
    return path


def outliers(path: Path, share: float, full_layers: int = 0) -> frozenset[tuple[int, int]]:
    policy = read_calibration(str(path)).with_outliers(Chelsea(), {"share": str(share)}, full_layers)
    assert policy.name == "chelsea+outliers"
    assert policy.num_kv_heads == NUM_KV_HEADS
    return policy.heads


def test_what_is_written_is_read(path: Path) -> None:
    read = read_calibration(str(path))
    assert (read.model, read.facts) == ("some-model", FACTS)
    assert torch.equal(read.outlier_scores, SCORES)
    read.check(make_model().config)
    tensors = load_file(path)
    assert set(tensors) == {"outlier_scores", "skew"}
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_a_file_is_replaced_at_once(path: Path) -> None:
    before = path.read_bytes()
    with path.open("rb") as reader:
        write_calibration(path, FACTS, replace(OBSERVATION, outlier_scores=SCORES / 2), {})
        # an open reader keeps the old file
        assert reader.read() == before
    assert torch.equal(read_calibration(str(path)).outlier_scores, SCORES / 2)
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_leaves_nothing(path: Path) -> None:
    before = path.read_bytes()
    folder = path.parent / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write_calibration(folder, FACTS, OBSERVATION, {})
    with pytest.raises(ConfigError, match="cannot write"):
        write_calibration(path.parent / "none" / "file", FACTS, OBSERVATION, {})
    assert sorted(path.parent.iterdir()) == [path, folder]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "other",
    [
        {"num_layers": 4},
        {"num_kv_heads": 3, "num_heads": 9},
        {"num_heads": 8},
        {"head_dim": 32},
        {"hidden_size": 64},
        {"vocab_size": 98},
        {"model_type": "qwen2"},
    ],
)
def test_a_file_of_another_model_is_refused(path: Path, other: dict) -> None:
    config = llama_config(replace(SHAPE, **other))
    with pytest.raises(ConfigError) as refused:
        read_calibration(str(path)).check(config)
    message = str(refused.value)
    assert str(path) in message
    assert "some-model" in message
    assert str(FACTS) in message
    assert str(ModelFacts.of(config)) in message


def test_the_outliers_are_the_highest_scores(path: Path) -> None:
    assert outliers(path, 2 / 6) == {(0, 1), (2, 0)}
    assert outliers(path, 1 / 6) == {(0, 1)}
    assert outliers(path, 0.04) == frozenset()


def test_outliers_count_layers_behind_the_dense_ones(path: Path) -> None:
    # those in a dense layer are whole already, and count toward the share
    assert outliers(path, 3 / 6) == {(0, 1), (2, 0), (1, 1)}
    assert outliers(path, 3 / 6, full_layers=1) == {(1, 0), (0, 1)}
    assert outliers(path, 3 / 6, full_layers=2) == {(0, 0)}
    assert outliers(path, 3 / 6, full_layers=9) == frozenset()


def test_infinigen_takes_the_files_skew(path: Path) -> None:
    policy = read_calibration(str(path)).skewed()
    shape = CacheShape(
        1, NUM_LAYERS, NUM_KV_HEADS, 3, RowFormat(HEAD_DIM, "fp32"), 64, 0.25, torch.device("cpu")
    )
    skew = policy.allocate(shape).skew
    assert skew is not None
    assert torch.equal(skew, SKEW)
    # A cache has those of the layers that it serves.
    later = policy.allocate(shape.part((1, 2))).skew
    assert later is not None
    assert torch.equal(later, SKEW[1:])


def test_files_that_are_none_of_ours_are_refused(path: Path, tmp_path: Path) -> None:
    alien = tmp_path / "model.safetensors"
    save_file({"outlier_scores": SCORES, "skew": SKEW}, alien)
    with pytest.raises(ConfigError, match="no file of `carrel calibrate`"):
        read_calibration(str(alien))
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(path.read_bytes()[:1000])
    for unreadable in (damaged, tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be read.*carrel calibrate"):
            read_calibration(str(unreadable))


def test_a_file_that_contradicts_itself_is_refused(path: Path) -> None:
    def rewrite(observation: Observation) -> None:
        write_calibration(path, FACTS, observation, {})

    for observation in (replace(OBSERVATION, outlier_scores=SCORES[:2]), Observation(SCORES, SKEW[..., :-1])):
        rewrite(observation)
        with pytest.raises(ConfigError, match="does not hold what it says"):
            read_calibration(str(path))
    rewrite(Observation(SCORES.log(), SKEW))
    with pytest.raises(ConfigError, match="no numbers"):
        read_calibration(str(path))
