"""The programs of `kernel`."""

# The launched functions take what no annotation names.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from gpu_worker.kernels.attention.programs import dot

# Four bytes become four numbers of 16 bits, two in a register: byte by byte these are three times as many operations.
# Bytes go to the upper halves; sign and the other bits move to their places; a product mends the exponent's bias.
# Subnormal numbers stay subnormal until the product, and come out right as well.
_E4M3_TO_BFLOAT16: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, c, d, one, zero;
prmt.b32 a, 0, $2, 0x5040;
prmt.b32 b, 0, $2, 0x7060;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
and.b32 a, a, 0x80008000;
and.b32 b, b, 0x80008000;
or.b32 a, a, c;
or.b32 b, b, d;
mov.b32 one, 0x7b807b80;
mov.b32 zero, 0x80008000;
fma.rn.bf16x2 $0, a, one, zero;
fma.rn.bf16x2 $1, b, one, zero;
}""")
# A nibble below the fraction of 128 is 128 plus the nibble; a difference of 136 makes a number from -8 to 7 of it.
_NIBBLES_TO_BFLOAT16: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, c, d, one, less;
prmt.b32 a, 0, $4, 0x0504;
prmt.b32 b, 0, $4, 0x0706;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
mov.b32 one, 0x3f803f80;
mov.b32 less, 0xc308c308;
fma.rn.bf16x2 $0, a, one, less;
fma.rn.bf16x2 $1, b, one, less;
fma.rn.bf16x2 $2, c, one, less;
fma.rn.bf16x2 $3, d, one, less;
}""")


@triton.jit
def _e4m3(code, HALF: tl.constexpr, IS_PLAIN: tl.constexpr):
    """Widen e4m3 bits to the type HALF; see `_E4M3_TO_BFLOAT16`."""
    if tl.bfloat16 == HALF and not IS_PLAIN:
        number = tl.inline_asm_elementwise(
            _E4M3_TO_BFLOAT16, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        wide = code.to(tl.int16)
        bits = (wide & 0x80) << 8 | (wide & 0x7F) << 7
        number = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256).to(HALF)
    return number


@triton.jit
def _nibbles(code, HALF: tl.constexpr, IS_PLAIN: tl.constexpr):
    """Numbers of the low and the high nibbles in the type HALF."""
    if tl.bfloat16 == HALF and not IS_PLAIN:
        low, high = tl.inline_asm_elementwise(
            _NIBBLES_TO_BFLOAT16,
            "=r,=r,=r,=r,r",
            [code],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = ((code & 15).to(tl.float32) - 8).to(HALF), ((code >> 4).to(tl.float32) - 8).to(HALF)
    return low, high


@triton.jit
def _numbers(code, KIND: tl.constexpr, HALF: tl.constexpr, IS_PLAIN: tl.constexpr):
    """Numbers of one a byte, exact in the type HALF."""
    if KIND == "e4m3":
        return _e4m3(code, HALF, IS_PLAIN)
    elif IS_PLAIN:
        return code.to(tl.float32).to(HALF)
    else:
        return code.to(HALF)


@triton.jit
def _scale(word, IS_HALF: tl.constexpr):
    """IS_HALF: a float16 in the low half of an int32; else a float32."""
    if IS_HALF:
        return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return word


@triton.jit
def _read(places, is_there, IS_WHOLE: tl.constexpr):
    """IS_WHOLE: all of them are there, and masks would cost as much as the product."""
    if IS_WHOLE:
        return tl.load(places)
    else:
        return tl.load(places, mask=is_there, other=0)


@triton.jit(do_not_specialize=["num_rows", "steps_per_split"])
def multiply_split(
    inputs, input_row, codes, code_step, code_row, scales, bias, onto, onto_row, out, partials, tickets,
    num_rows, num_columns, num_outputs, num_steps, steps_per_split,
    KIND: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr, GROUP_STEPS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr, IS_SPLIT: tl.constexpr, STAGES: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """Sums [OUTPUTS, ROWS] of a part of the columns. bias, onto: None where there are none.

    GROUP_STEPS: steps that share a scale; 0 where all do.
    IS_WHOLE: outputs and columns are whole tiles and turns.
    """
    HALF: tl.constexpr = inputs.dtype.element_ty
    WIDTH: tl.constexpr = SPAN // 2 if KIND == "nibbles" else SPAN
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_output = output < num_outputs
    lane = tl.arange(0, WIDTH)
    first = tl.program_id(1) * steps_per_split
    last = tl.minimum(first + steps_per_split, num_steps)
    # the last row stands for those that are not there, which are not stored
    inputs += tl.minimum(row, num_rows - 1)[None, :] * input_row
    codes += output[:, None] * code_row + lane[None, :]
    codes += tl.program_id(1).to(tl.int64) * steps_per_split * code_step
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(first, last, UNROLL, num_stages=STAGES):
        for turn in tl.static_range(UNROLL):
            step = start + turn
            column = step * SPAN + lane
            is_here = (column < num_columns) & (step < last)
            code = _read(codes + turn * code_step, is_output[:, None] & is_here[None, :], IS_WHOLE)
            part = _read(inputs + column[:, None], is_here[:, None], IS_WHOLE)
            if KIND == "nibbles":
                column += WIDTH
                is_high = (column < num_columns) & (step < last)
                high = _read(inputs + column[:, None], is_high[:, None], IS_WHOLE)
                low_number, high_number = _nibbles(code, HALF, IS_PLAIN)
                product = dot(low_number, part, IS_PLAIN)
                product += dot(high_number, high, IS_PLAIN)
            else:
                product = dot(_numbers(code, KIND, HALF, IS_PLAIN), part, IS_PLAIN)
            if GROUP_STEPS > 0:
                at = step // GROUP_STEPS * num_outputs + output
                is_read = is_output & (step < last)
                word = _read(scales + at, is_read, IS_WHOLE)
                total += product * _scale(word, HAS_OFFSETS)[:, None]
                if HAS_OFFSETS:
                    # as a product, which needs no exchange between threads
                    ones = tl.full([OUTPUTS, WIDTH], 1, tl.float32 if IS_PLAIN else HALF)
                    summed = dot(ones, part, IS_PLAIN)
                    if KIND == "nibbles":
                        summed += dot(ones, high, IS_PLAIN)
                    total += _scale(word >> 16, HAS_OFFSETS)[:, None] * summed
            else:
                total += product
        codes += UNROLL * code_step
    is_stored = is_output[:, None] & (row < num_rows)[None, :]
    place = row[None, :] * num_outputs + output[:, None]
    if IS_SPLIT:
        own = tl.program_id(1).to(tl.int64) * num_rows * num_outputs
        tl.store(partials + own + place, total, mask=is_stored)
        # every thread has stored before one of them says so
        tl.debug_barrier()
        tickets += tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        ticket = tl.atomic_add(tickets, 1, sem="acq_rel")
        if ticket == tl.num_programs(1) - 1:
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for _ in range(0, tl.num_programs(1)):
                # not from a cache that other processors do not write to
                total += tl.load(partials + place, mask=is_stored, other=0, cache_modifier=".cg")
                place += num_outputs * num_rows
            tl.store(tickets, 0)
            _finish(total, scales, bias, onto, onto_row, out, output, row, num_rows, num_outputs, GROUP_STEPS)
    else:
        _finish(total, scales, bias, onto, onto_row, out, output, row, num_rows, num_outputs, GROUP_STEPS)


@triton.jit
def _finish(
    total, scales, bias, onto, onto_row, out, output, row, num_rows, num_outputs, GROUP_STEPS: tl.constexpr
):
    is_output = output < num_outputs
    is_stored = is_output[:, None] & (row < num_rows)[None, :]
    if GROUP_STEPS == 0:
        total *= tl.load(scales + output, mask=is_output, other=0)[:, None]
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0).to(tl.float32)[:, None]
    if onto is not None:
        before = tl.load(onto + row[None, :] * onto_row + output[:, None], mask=is_stored, other=0)
        total += before.to(tl.float32)
    place = row[None, :] * num_outputs + output[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def unpack_tile(
    codes, code_step, code_row, scales, out, begin, end, num_columns, num_outputs,
    KIND: tl.constexpr, SPAN: tl.constexpr, GROUP_STEPS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    ROWS: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """Values of some rows in one step's columns."""
    WIDTH: tl.constexpr = SPAN // 2 if KIND == "nibbles" else SPAN
    row = begin + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    step = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    column, is_row = step * SPAN + lane, row < end
    is_read = is_row[:, None] & (column < num_columns)[None, :]
    code = tl.load(codes + row[:, None] * code_row + step * code_step + lane[None, :], mask=is_read, other=0)
    group = step // GROUP_STEPS if GROUP_STEPS > 0 else 0
    word = tl.load(scales + group * num_outputs + row, mask=is_row, other=0)
    scale = _scale(word, HAS_OFFSETS)[:, None]
    offset = _scale(word >> 16, HAS_OFFSETS)[:, None] if HAS_OFFSETS else tl.zeros_like(scale)
    out += (row - begin)[:, None] * num_columns + column[None, :]
    if KIND == "nibbles":
        low, high = _nibbles(code, tl.bfloat16, IS_PLAIN)
        _keep(out, low, scale, offset, is_read)
        is_high = is_row[:, None] & (column + WIDTH < num_columns)[None, :]
        _keep(out + WIDTH, high, scale, offset, is_high)
    else:
        _keep(out, _numbers(code, KIND, tl.bfloat16, IS_PLAIN), scale, offset, is_read)


@triton.jit
def _keep(out, number, scale, offset, is_kept):
    value = number.to(tl.float32) * scale + offset
    tl.store(out, value.to(out.dtype.element_ty), mask=is_kept)
