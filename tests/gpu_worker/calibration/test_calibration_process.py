"""`python -m gpu_worker.calibration`: what it refuses, with one line and the status of an unusable configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_worker.calibration import Observation
from gpu_worker.calibration.__main__ import describe_outliers, main

NANO = Path(__file__).resolve().parents[3] / "models" / "carrel-nano"


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "must hold one list"),
        ("[]", "must hold one list"),
        ("{}", "must hold one list"),
        ("[1, 2", "cannot be read"),
        ("[1, true]", "no whole numbers"),
        ("[1, 8192]", "outside the model's vocabulary of 8192"),
        ("[-1, 1]", "outside the model's vocabulary of 8192"),
        (json.dumps([1] * 32769), "--length 32769 exceeds the model's 32768"),
        (json.dumps([1] * 81), "the sample has 81 tokens"),
    ],
)
def test_samples_that_cannot_be_used(
    lines: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, out = tmp_path / "samples", tmp_path / "out"
    samples.write_text(lines)
    assert main([str(NANO), "--samples", str(samples), "--out", str(out), "--device", "cpu"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("gpu_worker: ")
    assert message in error
    assert not out.exists()


def test_outliers_are_named_from_the_highest_score() -> None:
    scores = torch.tensor([[0.1, 0.5], [0.9, 0.1]])
    line = describe_outliers(Observation(scores, torch.zeros(0)), 0.5)
    assert (
        line
        == "outlier heads, 2 of 4: layer 1 head 0 (0.900), layer 0 head 1 (0.500); the mean score is 0.400"
    )
    assert "0 of 4: none;" in describe_outliers(Observation(scores, torch.zeros(0)), 0.1)
