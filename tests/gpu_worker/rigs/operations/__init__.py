"""The table of the kernels that `kernel_contract` checks, by what they do."""

from __future__ import annotations

from operations import (
    activations,
    attention,
    bits,
    clusters,
    groups,
    packed,
    pages,
    products,
    selection,
    weights,
)

OPERATIONS = tuple(
    operation
    for part in (activations, attention, bits, clusters, groups, packed, pages, products, selection, weights)
    for operation in part.OPERATIONS
)
