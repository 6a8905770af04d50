"""Products with packed matrices, and their values."""

from __future__ import annotations

import torch
from kernel_contract import Arguments, Operation, case, split
from torch import Tensor, bfloat16, float16, float32

from gpu_worker.kernels.packed_matmul.reference import PackedMatrix, pack_scales, pack_steps, span_of

# Kind, group (0: all columns), and whether there are offsets.
KINDS = (
    ("e4m3", 0, False), ("e4m3", 128, False), ("nibbles", 128, False), ("nibbles", 32, True), ("nibbles", 64, True),
    ("nibbles", 0, True), ("nibbles", 192, False), ("int8", 32, False), ("int8", 16, True), ("int8", 0, False),
)  # fmt: skip


def drawn_matrix(kind: str, num_rows: int, num_columns: int, group: int, has_offsets: bool) -> PackedMatrix:
    """All bytes that the kind has, and scales of very different size."""
    generator = torch.Generator().manual_seed(num_columns)
    group = group or num_columns
    size, span = (num_rows, num_columns), span_of(num_columns, group)
    if kind == "e4m3":
        codes = torch.randint(0, 256, size, generator=generator, dtype=torch.int16).to(torch.uint8)
        # what is not a number is not stored
        codes[(codes & 0x7F) == 0x7F] = 1
        codes = codes.view(torch.float8_e4m3fn)
    else:
        bits, most = (4, 8) if kind == "nibbles" else (8, 128)
        numbers = torch.randint(-most, most, size, generator=generator, dtype=torch.int16).to(torch.int8)
        codes = pack_steps(numbers, span, bits)
    shape = -(-num_columns // group), num_rows
    scales = 2.0 ** torch.randint(-9, -3, shape, generator=generator)
    scales *= 1 + torch.rand(shape, generator=generator)
    offsets = torch.randn(shape, generator=generator) if has_offsets else None
    tickets = torch.zeros(-(-num_rows // 16), dtype=torch.int32)
    return PackedMatrix(codes, pack_scales(scales, offsets), tickets, num_columns, group)


def factors(
    kind: str, group: int, has_offsets: bool, size: tuple[int, int, int],
    dtype: torch.dtype = bfloat16, adds: bool = False,
) -> Arguments:  # fmt: skip
    """size: rows of the inputs, of the matrix, and columns. adds: a bias, and rows to add to."""
    num_rows, num_outputs, num_columns = size
    generator = torch.Generator().manual_seed(num_rows)
    return {
        "inputs": torch.randn(num_rows, num_columns, generator=generator).to(dtype),
        "matrix": drawn_matrix(kind, num_outputs, num_columns, group, has_offsets),
        "bias": 8 * torch.randn(num_outputs, generator=generator).to(dtype) if adds else None,
        "onto": 8 * torch.randn(num_rows, num_outputs, generator=generator).to(dtype) if adds else None,
    }


def values(matrix: PackedMatrix) -> Tensor:
    """Written down number by number, in double precision."""
    num_rows, num_columns = matrix.num_rows, matrix.num_columns
    column = torch.arange(num_columns)
    if matrix.codes.dim() == 2:
        numbers = matrix.codes.double()
    else:
        step, place = column // matrix.span, column % matrix.span
        half = matrix.span // 2
        if matrix.codes.dtype == torch.uint8:
            byte = matrix.codes[step, :, place % half].T.long()
            numbers = (torch.where(place < half, byte % 16, byte // 16) - 8).double()
        else:
            numbers = matrix.codes[step, :, place].T.double()
    group = column // matrix.group
    if matrix.has_offsets:
        pairs = matrix.scales.view(torch.float16).double()[group].T
        found = numbers * pairs[::2] + pairs[1::2]
    else:
        found = numbers * matrix.scales.double()[group].T
    assert found.shape == (num_rows, num_columns)
    return found


def product(inputs: Tensor, matrix: PackedMatrix, bias: Tensor | None, onto: Tensor | None) -> Tensor:
    found = inputs.double() @ values(matrix).T
    for addend in (bias, onto):
        found = found if addend is None else found + addend.double()
    return found


def rounded(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], arguments: Arguments) -> None:
    """Rounded once, after sums in float32 of numbers as large as these."""
    (result,), (exact,) = found, expected
    largest = arguments["inputs"].double().abs() @ values(arguments["matrix"]).abs().T
    bound = torch.finfo(result.dtype).eps * exact.abs() + 1e-5 * largest + 1e-6
    assert result.shape == exact.shape
    assert ((result.double() - exact).abs() <= bound).all()


def cut_rows(kind: str, group: int, has_offsets: bool, dtype: torch.dtype) -> Arguments:
    matrix = drawn_matrix(kind, 75, 384, group, has_offsets)
    return {"matrix": matrix, "begin": 5, "end": 73, "dtype": dtype}


def own_rows(matrix: PackedMatrix, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    return values(matrix)[begin:end].to(dtype)


def inputs_of(num_rows: int, num_columns: int, dtype: torch.dtype) -> Arguments:
    """Rows of very different size; the second is zero."""
    generator = torch.Generator().manual_seed(num_columns)
    inputs = torch.randn(num_rows, num_columns, generator=generator).exp2()
    inputs *= torch.where(torch.rand(inputs.shape, generator=generator) < 0.5, -1, 1)
    inputs *= 100.0 ** torch.arange(num_rows)[:, None]
    inputs[1:2] = 0
    return {"inputs": inputs.to(dtype)}


def near_inputs(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], arguments: Arguments) -> None:
    """Codes times scales are the inputs, to half a step of e4m3; the largest of a row is 448."""
    (codes, scales), inputs = found, arguments["inputs"].double()
    assert (codes.dtype, scales.dtype) == (torch.float8_e4m3fn, float32)
    assert scales.shape == (len(inputs), 1)
    error = (codes.double() * scales.double() - inputs).abs()
    assert (error <= 1.001 * inputs.abs() / 16 + scales * 2**-10).all()
    largest = codes.double().abs().amax(dim=1)
    assert (largest[inputs.any(dim=1)] == 448).all()
    assert (largest[~inputs.any(dim=1)] == 0).all()
    assert (scales > 0).all()


OPERATIONS = (
    Operation(
        package="gpu_worker.kernels.quantise_rows",
        function="quantise_rows",
        agree=near_inputs,
        strides={"inputs": 1},
        lanes=("inputs",),
        captured=True,
        cases=tuple(
            case(inputs_of, *size, dtype)
            for size in ((3, 70), (1, 1), (2, 1024))
            for dtype in (bfloat16, float32)
        ),
    ),
    Operation(
        package="gpu_worker.kernels.packed_matmul",
        function="packed_matmul",
        exact=product,
        agree=rounded,
        strides={"inputs": 1, "onto": 1},
        lanes=("inputs", "onto"),
        captured=True,
        cases=(
            *(case(factors, *kind, (3, 70, 384), adds=True) for kind in KINDS),
            *(case(factors, *kind, (17, 64, 416), float16, settings=split(1)) for kind in KINDS[:8:3]),
            *(case(factors, *kind, (9, 130, 400), settings=split(3)) for kind in (KINDS[0], KINDS[3])),
            case(factors, *KINDS[2], (1, 1, 1)),
            case(factors, *KINDS[1], (67, 33, 300)),
            case(factors, *KINDS[2], (67, 64, 512), settings=split(2)),
            # the last split has fewer columns
            case(factors, *KINDS[2], (3, 128, 384), settings=split(1)),
            case(factors, *KINDS[4], (130, 96, 320), adds=True),
        ),
    ),
    Operation(
        package="gpu_worker.kernels.packed_matmul",
        function="unpack_rows",
        exact=own_rows,
        rtol=8e-3,
        atol=1e-6,
        captured=True,
        cases=tuple(
            case(cut_rows, *kind, dtype)
            for kind, dtype in zip(KINDS, (bfloat16, float16, bfloat16, float32, bfloat16) * 2, strict=True)
        ),
    ),
)
