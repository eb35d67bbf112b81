"""Two numbers at a time: how decode and verify over even shares read a pool of 8-bit floats.

Tensor cores want an operand's summed axis beside itself in registers. For keys that is their own axis; for values it is
the other one, and a GPU turns 16-bit numbers on the way from shared memory, not 8-bit ones: a tile of fp8 values would
be read byte by byte. So such a pool is read as int16, two neighbouring columns in one number, which turns like any
other. Its even and its odd columns are two tiles of half the width: scores are the sum of two products, and the
accumulator is a pair too, joined when all is summed.

Tiles are fp16, in which every e4m3 number is exact; rows of queries are scaled into its range, and weights up from its
end.
Source: PTX ISA, `ldmatrix` and `cvt.rn.f16x2.e4m3x2`.
"""

from __future__ import annotations

from attnlab._triton import jit, tl

_UNPACK = """
{
  .reg .b16 first, second;
  .reg .b32 of_first, of_second;
  mov.b32 {first, second}, $2;
  cvt.rn.f16x2.e4m3x2 of_first, first;
  cvt.rn.f16x2.e4m3x2 of_second, second;
  prmt.b32 $0, of_first, of_second, 0x5410;
  prmt.b32 $1, of_first, of_second, 0x7632;
}
"""
UNPACK = None if tl is None else tl.constexpr(_UNPACK)
POWERS = (2.0**-60, 2.0**112)
"""The least and the largest power of 2 that rows of queries are divided by."""
LEAST_POWER, MOST_POWER = (None, None) if tl is None else map(tl.constexpr, POWERS)
# Weights are at most 1, and fp16 ends at 2^-24: times 2^15, which it holds too, nothing above 2^-39 is lost.
LIFT = None if tl is None else tl.constexpr(15.0)
UNLIFT = None if tl is None else tl.constexpr(2.0**-15)


@jit
def number_of(bits, COMPUTE: tl.constexpr):
    """The e4m3 number of these 8 bits. NaN is told apart by hand: Triton's interpreter reads it as 480."""
    number = bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(COMPUTE)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)


@jit
def unpacked(pairs, COMPUTE: tl.constexpr):
    """The even and the odd columns of pairs of e4m3 numbers."""
    if COMPUTE == tl.float16:  # noqa: SIM300  (a name in capitals, not a constant)
        # One instruction converts two numbers, another sorts them: what Triton makes of the lines below takes five.
        even, odd = tl.inline_asm_elementwise(
            UNPACK, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even = number_of(pairs & 0xFF, COMPUTE)
        odd = number_of((pairs >> 8) & 0xFF, COMPUTE)
    return even, odd


@jit
def load_pairs(rows, mask_rows, FIRST: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, COMPUTE: tl.constexpr):
    """Even and odd columns of rows of pairs, FIRST to FIRST + BLOCK; 0 beyond DIM columns and in masked rows."""
    columns = FIRST + tl.arange(0, BLOCK)
    if mask_rows is not None:
        mask = mask_rows[:, None] & (columns < DIM // 2)[None, :]
        pairs = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0)
    elif FIRST + BLOCK > DIM // 2:
        pairs = tl.load(rows[:, None] + columns[None, :], mask=(columns < DIM // 2)[None, :], other=0)
    else:
        pairs = tl.load(rows[:, None] + columns[None, :])
    return unpacked(pairs, COMPUTE)


@jit
def load_even_odd(rows, mask_rows, FIRST: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Even and odd columns of rows that hold one number a column, fp32; as `load_pairs` has them."""
    columns = 2 * (FIRST + tl.arange(0, BLOCK))
    mask = mask_rows[:, None] & (columns < DIM)[None, :]
    even = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(rows[:, None] + columns[None, :] + 1, mask=mask, other=0.0).to(tl.float32)
    return even, odd


@jit
def largest_of(even, odd):
    """[rows]: the largest number of a row, its sign aside."""
    return tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)


@jit
def load_paired_queries(
    rows, mask_rows, QK_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, COMPUTE: tl.constexpr
):
    """Queries as `load_queries` has them, even and odd columns, and what products of each row are to be scaled by.

    A row is divided by the power of 2 that its largest number begins with: all are below 2 then, and within fp16.
    """
    even, odd = load_even_odd(rows, mask_rows, 0, BLOCK_D, QK_DIM)
    largest = largest_of(even, odd)
    if BLOCK_R > 0:
        rest_even, rest_odd = load_even_odd(rows, mask_rows, BLOCK_D, BLOCK_R, QK_DIM)
        largest = tl.maximum(largest, largest_of(rest_even, rest_odd))
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # Queries below the least power make scores as good as 0; divided by the largest, 2^127 still is within fp16.
    power = tl.clamp(power, LEAST_POWER, MOST_POWER)
    q = ((even / power[:, None]).to(COMPUTE), (odd / power[:, None]).to(COMPUTE))
    if BLOCK_R > 0:
        q_rest = ((rest_even / power[:, None]).to(COMPUTE), (rest_odd / power[:, None]).to(COMPUTE))
    else:
        q_rest = q
    return q, q_rest, power


@jit
def join_columns(running_sum, acc, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr):
    """The sum and the accumulator as other kernels leave them: columns in their order, weights without their lift."""
    columns = tl.reshape(tl.join(acc[0], acc[1]), (BLOCK_H, BLOCK_V))
    return running_sum * UNLIFT, columns * UNLIFT
