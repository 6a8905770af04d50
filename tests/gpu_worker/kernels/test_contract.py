"""Every kernel of the table keeps the contract: see `kernel_contract`. A new kernel adds a row to its table."""

from __future__ import annotations

import pytest
import torch
from kernel_contract import Operation, Refusal, check_case, check_graph, check_no_lanes, check_refusal

pytest.importorskip("triton")

from operations import OPERATIONS

CASES = [
    pytest.param(operation, place, id=f"{operation.name}: {one.label}")
    for operation in OPERATIONS
    for place, one in enumerate(operation.cases)
]
EACH = [pytest.param(operation, id=operation.name) for operation in OPERATIONS]


@pytest.mark.parametrize(("operation", "place"), CASES)
def test_kernel_and_reference_are_the_definition(
    operation: Operation, place: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in operation.cases[place].settings.items():
        monkeypatch.setattr(operation.module(operation.kernel), name, value)
    check_case(operation, place, device)


@pytest.mark.parametrize("operation", [each for each in EACH if each.values[0].lanes])
def test_no_lanes_are_no_error(operation: Operation, device: torch.device) -> None:
    check_no_lanes(operation, device)


@pytest.mark.parametrize(
    ("operation", "refusal"),
    [
        pytest.param(operation, refusal, id=f"{operation.name}: {refusal.message}")
        for operation in OPERATIONS
        for refusal in operation.refusals
    ],
)
def test_what_does_not_fit_is_refused(operation: Operation, refusal: Refusal, device: torch.device) -> None:
    check_refusal(operation, refusal, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "place"), [each for each in CASES if each.values[0].captured])
def test_a_captured_graph_follows_its_inputs(
    operation: Operation, place: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in operation.cases[place].settings.items():
        monkeypatch.setattr(operation.module(operation.kernel), name, value)
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    check_graph(operation, place)
