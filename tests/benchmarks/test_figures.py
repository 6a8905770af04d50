"""The records that all benchmarks share, and the shapes of models."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.about import about
from benchmarks.figures import DecodeCase, DecodeFigures, PrefillFigures, Report, Spread, revive
from benchmarks.rivals.dense_model import DenseModel
from benchmarks.shapes import SHAPES

CASE = DecodeCase("tiny", "pqcache", 16, 2, 64, 0.9, 1 << 30, 5)
FIGURES = DecodeFigures(Spread(2.0, 1.0, 3.0, 5), 100, 200, 7.0, 0.9, 16.0)


def test_a_spread_has_the_median_and_its_bounds() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)
    found = Spread.of(float(value) for value in range(101))
    assert (found.median, found.low, found.high, found.n) == (50.0, 10.0, 90.0, 101)
    assert found.scaled(0.5) == Spread(25.0, 5.0, 45.0, 101)


def test_rounds_are_joined() -> None:
    rounds = [Spread(2.0, 1.0, 3.0, 5), Spread(4.0, 2.0, 9.0, 5), Spread(3.0, 2.0, 4.0, 5)]
    assert Spread.over(rounds) == Spread(3.0, 1.0, 9.0, 15)
    other = DecodeFigures(Spread(4.0, 4.0, 4.0, 1), 300, 100, 9.0)
    joined = DecodeFigures.over([FIGURES, other])
    assert (joined.device_bytes, joined.host_bytes, joined.bytes_moved) == (300, 200, 8.0)
    assert joined.hit_rate == 0.9
    first = PrefillFigures(Spread(1.0, 1.0, 1.0, 1), None, 1)
    assert PrefillFigures.over([first, first]).tt2t_ms is None


@pytest.mark.parametrize("record", [CASE, FIGURES, DecodeFigures(Spread(1.0, 1.0, 1.0, 1), 1)])
def test_records_travel_as_json(record: DecodeCase | DecodeFigures) -> None:
    assert revive(type(record), json.loads(json.dumps(asdict(record)))) == record


def test_a_report_says_where_it_comes_from(tmp_path: Path) -> None:
    found = about(["decode", "--json", "a b"], "cpu", commit="abc")
    assert found["command"] == "carrel bench decode --json 'a b'"
    assert found["commit"] == "abc"
    machine = found["machine"]
    assert machine["torch"] == torch.__version__.split("+")[0] or machine["torch"] == torch.__version__
    assert {"device", "driver", "triton", "python", "cores"} <= set(machine)
    Report("decode", found, {"tiny": SHAPES["tiny"]}, (CASE,)).write(tmp_path / "deep" / "r.json")
    content = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert content["shapes"]["tiny"]["num_kv_heads"] == 2
    assert content["rows"][0]["policy"] == "pqcache"


def test_shapes_count_their_weights() -> None:
    model = DenseModel(SHAPES["tiny"], torch.device("cpu"), torch.float32)
    layers = [getattr(layer, name) for layer in model.layers for name in ("qkv", "output", "gate_up", "down")]
    held = sum(matrix.numel() for matrix in [*layers, model.embed, model.head])
    assert SHAPES["tiny"].num_weights == held
    llama = SHAPES["llama-3.1-8b"]
    assert llama.num_weights == pytest.approx(8.03e9, rel=1e-3)
    assert llama.kv_bytes(131072, 512) == 16 << 30


def test_a_shape_is_a_config_that_carrel_reads(tmp_path: Path) -> None:
    from gpu_worker.models.read_config import read_config

    for shape in SHAPES.values():
        folder = tmp_path / shape.name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape.config_fields(max_len=1 << 18)))
        config = read_config(folder)
        assert (config.num_kv_heads, config.head_dim) == (shape.num_kv_heads, shape.head_dim)
        assert config.layers[0].attention.rope.theta == shape.rope_theta
        assert config.max_model_len == max(shape.max_len, 1 << 18)
