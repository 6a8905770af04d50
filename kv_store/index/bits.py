"""Keys centred, rotated and rounded to two bits a coordinate: what `bitkeys` has, for a worker without indexes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import log2

import numpy as np
import numpy.typing as npt

from kv_store.client.errors import InvalidStoreRequest
from kv_store.client.indexes import MAX_SINKS, ArraySpec, BitParams
from kv_store.client.layout import Layout
from kv_store.index.base import Array, Fit, FitOptions, Index, top_k_positions
from kv_store.index.keys import ArenaKeys, Keys

# Of a normal coordinate four values this far apart, in standard deviations, lose the least.
_STEP = np.float32(0.9957)
_LARGEST_SCALE = np.float32(65504)
# Of a rounded query, either way.
_LARGEST = np.float32(127)
# Candidates by which a head's total is estimated, at most.
_NUM_SAMPLES = 512
# Weights are compared by the leading bits of their float32, 8 levels an octave, from two octaves above G / k downwards:
# of k tokens that are taken of a group of G queries, whose weights sum to G, the lightest weighs no more.
_LEVEL_SHIFT, _OCTAVE, _MAX_LEVEL, _ONE = 20, 8, 127, 127
# Tokens whose codes are spread at a time: what is made of them stays in a core's cache.
_SPAN = 512
# The four coordinates of a byte, from the lowest bits up: codes -2 to 1 are values half a step above them.
_VALUES = np.array(
    [[(byte >> shift & 3 ^ 2) - 1.5 for shift in (0, 2, 4, 6)] for byte in range(256)], np.float32
)


class BitIndex(Index):
    """Arrays: anchors float32 [H, 1 + S, d], the mean of the keys, then the first S keys, the sinks, less the mean;
    codes uint8 [H, N - S, W + 2] of the tokens behind the sinks, W = ceil(d / 4) bytes of codes as the worker's
    `key_bits` has them, and what a step is worth, a float16.

    Selects as `bit_select` of the worker does.
    """

    kind = "bits"

    def __init__(self, params: BitParams) -> None:
        if not 0 <= params.num_sinks <= MAX_SINKS:
            raise InvalidStoreRequest(f"num_sinks is {params.num_sinks}, it must be from 0 to {MAX_SINKS}")
        super().__init__(params, num_centroids=1)
        self.num_leading = params.num_sinks

    def specs(self, layout: Layout, num_tokens: int) -> tuple[ArraySpec, ...]:
        if num_tokens <= self.num_leading:
            raise InvalidStoreRequest(f"{num_tokens} tokens are no more than the {self.num_leading} sinks")
        return super().specs(layout, num_tokens)

    def fit_head(self, keys: ArenaKeys, options: FitOptions) -> Fit:
        total = sum(rows.sum(axis=0, dtype=np.float64) for _, rows in keys.spans())
        mean = (total / keys.num_rows).astype(np.float32)
        codes = self._codes(keys, mean)
        sinks = keys.span(0, self.num_leading) - mean if self.num_leading else np.empty((0, mean.size))
        return Fit((np.concatenate([mean[None], sinks]), codes[self.num_leading :]))

    def extend_head(self, keys: ArenaKeys, arrays: tuple[Array, ...]) -> Array:
        return self._codes(keys, arrays[0][0])

    def select_head(
        self, queries: Keys, segments: Sequence[tuple[Array, ...]], k: int, scale: float
    ) -> npt.NDArray[np.int64]:
        if len(segments) != 1:
            raise InvalidStoreRequest(
                f"the candidates are in {len(segments)} indexes of bits: build one over their first tokens"
            )
        anchors, codes = segments[0]
        # In base 2.
        scaled = np.float32(scale * log2(np.e))
        logits = _logits(queries, codes) * scaled
        normaliser = _log_totals(logits, queries @ anchors[1:].T * scaled)
        weights = np.exp2(logits - normaliser[:, None]).sum(axis=0)
        return top_k_positions(_levels(weights, k, len(queries)), k)

    def _codes(self, keys: ArenaKeys, mean: Keys) -> npt.NDArray[np.uint8]:
        coded = [_coded(rows - mean) for _, rows in keys.spans()]
        return np.concatenate(coded)


@cache
def _rotation(width: int) -> Keys:
    """The worker's rotation, float32 [d, d], before it is rounded: of powers of two a Hadamard matrix whose columns
    have random signs."""
    drawn = np.random.RandomState(width)
    if width & (width - 1):
        return np.linalg.qr(drawn.standard_normal((width, width)))[0].astype(np.float32)
    matrix = np.ones((1, 1))
    while matrix.shape[0] < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = drawn.randint(0, 1 << 32, width, np.uint32) % 2 * 2.0 - 1
    return (matrix * signs / np.sqrt(width)).astype(np.float32)


def _coded(centred: Keys) -> npt.NDArray[np.uint8]:
    """Codes and scales of keys [n, d]: uint8 [n, W + 2]."""
    num_rows, size = centred.shape
    rotated = centred @ _rotation(size).T
    square = np.einsum("nd,nd->n", rotated, rotated)
    step = _STEP * np.sqrt(square / size)
    code = np.floor(rotated / np.where(step > 0, step, 1)[:, None]).clip(-2, 1)
    product = np.einsum("nd,nd->n", rotated, code + np.float32(0.5))
    worth = np.minimum(square / np.where(product > 0, product, 1), _LARGEST_SCALE).astype("<f2")
    width = -(-size // 4)
    quarters = np.zeros((num_rows, 4 * width), np.uint8)
    quarters[:, :size] = code.astype(np.int8).view(np.uint8) & 3
    quarters = quarters.reshape(num_rows, 4, width) << np.array([[0], [2], [4], [6]], np.uint8)
    return np.concatenate([np.bitwise_or.reduce(quarters, axis=1), worth[:, None].view(np.uint8)], axis=1)


def _logits(queries: Keys, codes: npt.NDArray[np.uint8]) -> Keys:
    """Estimated products of queries [G, d] with the keys less their mean: float32 [G, n]."""
    group, size = queries.shape
    width = codes.shape[1] - 2
    rotated = queries @ _rotation(size).T
    unit = np.abs(rotated).max(axis=1, keepdims=True) / _LARGEST
    rounded = np.zeros((group, 4 * width), np.float32)
    rounded[:, :size] = np.floor(rotated / np.where(unit > 0, unit, 1) + np.float32(0.5))
    # By byte, then by its coordinates.
    by_byte = rounded.reshape(group, 4, width).transpose(2, 1, 0).reshape(4 * width, group)
    products = np.empty((len(codes), group), np.float32)
    for begin in range(0, len(codes), _SPAN):
        some = codes[begin : begin + _SPAN, :width]
        np.matmul(
            _VALUES.take(some, axis=0).reshape(len(some), -1), by_byte, out=products[begin : begin + _SPAN]
        )
    worth = np.ascontiguousarray(codes[:, width:]).view("<f2").astype(np.float32)
    return np.ascontiguousarray((products * worth).T) * unit


def _levels(weights: Keys, k: int, group: int) -> Keys:
    """Round weights float32 [n] of a group to the levels by which k of them are selected."""
    of_count = int(np.float32(k).view(np.int32)) >> _LEVEL_SHIFT
    base = (2 * _ONE + (group - 1).bit_length() + 2) * _OCTAVE - _MAX_LEVEL
    levels = (weights.view(np.int32) >> _LEVEL_SHIFT) + (of_count - base)
    return levels.clip(1, _MAX_LEVEL).astype(np.float32)


def _log_totals(logits: Keys, of_sinks: Keys) -> Keys:
    """Estimate the sum of each query's weights over sinks and a sample of candidates, as the worker does.

    Returns float32 [G], the logarithm in base 2."""
    stride = -(-logits.shape[1] // _NUM_SAMPLES)
    sampled = logits[:, stride // 2 :: stride]
    sampled = sampled + np.float32(log2(logits.shape[1] / sampled.shape[1]))
    return np.logaddexp2.reduce(np.concatenate([of_sinks, sampled], axis=1), axis=1)
