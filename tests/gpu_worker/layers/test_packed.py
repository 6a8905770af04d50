"""Matrices that are held as they are stored: few and many inputs, each rank's shard, and what cannot be packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.layers import Holding, Numbers, Piece, Rank, StoredMatrix, Target, packed
from gpu_worker.layers.packed import PackedWeights, ScaledRows
from gpu_worker.layers.weights import PlainMatrix

CPU = torch.device("cpu")
TARGET = Target(CPU, torch.bfloat16)
N, K = 80, 256
# Kind, group, and whether there are offsets and an order.
KINDS = (
    (Numbers.E4M3, 0, False, False), (Numbers.E4M3, 128, False, False), (Numbers.INT4, 32, True, False),
    (Numbers.INT4, 128, False, True), (Numbers.INT4, 0, False, False), (Numbers.INT8, 16, True, True),
)  # fmt: skip


@pytest.fixture(autouse=True)
def packs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PACKING_DEVICES", ("cpu",))


def drawn(numbers: Numbers, group: int, has_offsets: bool, has_order: bool) -> StoredMatrix:
    generator = torch.Generator().manual_seed(group)
    if numbers is Numbers.E4M3:
        codes = torch.randn(N, K, generator=generator).to(torch.float8_e4m3fn)
    else:
        most = 8 if numbers is Numbers.INT4 else 128
        codes = torch.randint(-most, most, (N, K), generator=generator).to(torch.int8)
    num_groups = -(-K // (group or K))
    scales = (0.1 + torch.rand(N, num_groups, generator=generator)) / 16
    offsets = torch.randn(N, num_groups, generator=generator) if has_offsets else None
    order = torch.randperm(K, generator=generator) if has_order else None
    return StoredMatrix(codes, scales, offsets, group, order)


def made(kind: tuple[Numbers, int, bool, bool], size: tuple[int, int] = (N, K)) -> packed.Matrix:
    numbers, group, has_offsets, has_order = kind
    return packed.hold([Holding(numbers, group, has_offsets, has_order)], size, TARGET)


def assert_near(found: Tensor, exact: Tensor) -> None:
    """Rounded to bfloat16, once or twice."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact.float(), rtol=2e-2, atol=1e-2 * float(exact.abs().amax()))


@pytest.mark.parametrize("num_rows", [1, 7, 90])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_values(
    kind: tuple[Numbers, int, bool, bool], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "FEW_ROWS", dict.fromkeys(packed.FEW_ROWS, 16))
    # three rows of the matrix at a time
    monkeypatch.setattr(packed, "UNPACKED_BYTES", 3 * 2 * K)
    stored, matrix = drawn(*kind), made(kind)
    # two sources
    matrix.load(stored, Piece(slice(30, N), slice(0, K), 0))
    matrix.load(stored, Piece(slice(0, 30), slice(0, K), N - 30))
    values = torch.cat([stored.values()[30:], stored.values()[:30]])
    inputs = torch.randn(num_rows, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias, total = torch.linspace(-9, 9, N).bfloat16(), torch.ones(num_rows, N).bfloat16()
    product = inputs.float() @ values.T
    assert_near(matrix.matmul(inputs), product)
    assert_near(matrix.matmul(inputs, bias), product + bias)
    assert_near(matrix.matmul_onto(total.clone(), inputs), product + total)
    # zeros again
    assert isinstance(matrix, PackedWeights)
    assert not matrix.packed.tickets.any()


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_ranks_are_whole_groups(kind: tuple[Numbers, int, bool, bool]) -> None:
    stored = drawn(*kind)
    if stored.order is not None:
        with pytest.raises(
            ModelError, match=r"inputs 0 to 128 in groups of .* cannot be divided among ranks"
        ):
            made(kind, (N, K // 2)).load(stored, Piece(slice(0, N), slice(0, K // 2), 0))
        return
    inputs = torch.randn(3, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    total = torch.zeros(3, N)
    for rank in (Rank(0, 2), Rank(1, 2)):
        columns = rank.of(K, "inputs")
        part = made(kind, (N, K // 2))
        part.load(stored, Piece(slice(0, N), columns, 0))
        total += part.matmul(inputs[:, columns])
    assert_near(total.bfloat16(), inputs.float() @ stored.values().T)
    if stored.group > 64:
        with pytest.raises(ModelError, match=f"inputs 0 to 64 in groups of {stored.group} cannot be divided"):
            made(kind, (N, 64)).load(stored, Piece(slice(0, N), slice(0, 64), 0))


def test_an_order_is_that_of_all_sources() -> None:
    kind = KINDS[3]
    matrix, first = made(kind), drawn(*kind)
    matrix.load(first, Piece(slice(0, 40), slice(0, K), 0))
    matrix.load(first, Piece(slice(40, N), slice(0, K), 40))
    assert first.order is not None
    other = StoredMatrix(first.codes, first.scales, group=first.group, order=first.order.flip(0))
    with pytest.raises(ModelError, match=r"different orders \(g_idx\)"):
        matrix.load(other, Piece(slice(40, N), slice(0, K), 40))


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_have_the_size_of_a_models(kind: tuple[Numbers, int, bool, bool]) -> None:
    matrix = made(kind)
    matrix.fill(torch.Generator().manual_seed(0))
    inputs = torch.randn(64, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert 0.1 < float(matrix.matmul(inputs).float().std()) / K**0.5 / 0.02 < 3


def test_8_bit_rows_are_multiplied_directly() -> None:
    matrix, stored = ScaledRows((N, K), TARGET), drawn(*KINDS[0])
    matrix.load(stored, Piece(slice(0, N), slice(0, K), 0))
    inputs = torch.randn(70, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = inputs.float() @ stored.values().T
    try:
        found = matrix.matmul(inputs, torch.ones(N).bfloat16())
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"PyTorch has no such product on a CPU: {error}")
    # inputs are rounded to 3 bits
    assert (found.float() - 1 - exact).square().mean().sqrt() < 0.05 * exact.std()


@pytest.mark.parametrize(
    ("numbers", "group", "target"),
    [
        (Numbers.INT4, 48, TARGET),
        (Numbers.INT8, 8, TARGET),
        (Numbers.INT4, 32, Target(CPU, torch.float32)),
        (Numbers.E4M3, 0, Target(torch.device("meta"), torch.bfloat16)),
    ],
)
def test_what_kernels_cannot_read_is_held_plain(numbers: Numbers, group: int, target: Target) -> None:
    assert isinstance(packed.hold([Holding(numbers, group)], (N, K), target), PlainMatrix)


INT4, INT8 = (
    Holding(Numbers.INT4, 128),
    Holding(Numbers.INT8, 32, has_offsets=True),
)


@pytest.mark.parametrize("others", [[INT8], [Holding(Numbers.INT4)], [INT8, Holding(Numbers.INT4, 64)]])
def test_numbers_of_several_kinds_are_held_together(others: list[Holding]) -> None:
    """In the most bits and the smallest groups of them."""
    holdings = [INT4, *others]
    matrix = packed.hold(holdings, (N * len(holdings), K), TARGET)
    assert isinstance(matrix, PackedWeights)
    inputs, values = torch.randn(5, K, generator=torch.Generator().manual_seed(1)).bfloat16(), []
    for place, each in enumerate(holdings):
        stored = drawn(each.numbers, each.group, each.has_offsets, False)
        matrix.load(stored, Piece(slice(0, N), slice(0, K), N * place))
        values.append(stored.values())
    assert_near(matrix.matmul(inputs), inputs.float() @ torch.cat(values).T)


@pytest.mark.parametrize(
    "other", [None, Holding(Numbers.E4M3), replace(INT4, has_order=True), replace(INT4, group=96)]
)
def test_what_cannot_be_held_together_is_held_plain(other: Holding | None) -> None:
    assert isinstance(packed.hold([INT4, other], (N, K), TARGET), PlainMatrix)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 40, 100, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_multiplies_packed_weights_in_a_captured_graph(
    kind: tuple[Numbers, int, bool, bool], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(packed, "PACKING_DEVICES", ("cuda",))
    device, (numbers, group, has_offsets, has_order) = torch.device("cuda"), kind
    stored, target = drawn(*kind), Target(device, torch.bfloat16)
    matrix = packed.hold([Holding(numbers, group, has_offsets, has_order)], (N, K), target)
    assert isinstance(matrix, PackedWeights)
    matrix.load(stored, Piece(slice(0, N), slice(0, K), 0))
    inputs = torch.randn(num_rows, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact, given = inputs.float() @ stored.values().T, torch.zeros_like(inputs, device=device)
    matrix.matmul(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = matrix.matmul(given)
        onto = matrix.matmul_onto(torch.ones_like(product), given)
    given.copy_(inputs)
    for _ in range(2):
        graph.replay()
        # many inputs of 8-bit rows are rounded to 3 bits
        for found in (product, onto - 1):
            assert (found.float().cpu() - exact).square().mean().sqrt() < 0.05 * exact.std()
    assert not matrix.packed.tickets.any()
