"""Weight that tokens get from some of a prompt's queries; bound by arithmetic where these are many, it must at least
read every key once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.base import (
    KernelCase,
    Operands,
    Setting,
    contexts,
    num_bytes_of,
    relative_error,
)

# SnapKV's last queries; SemanticKV's, one of so many, anywhere
NUM_LAST = 32
SCATTERED_SHARE = 50
# of the rival: above, it takes longer than all other cases
MAX_SCORES = 1 << 30


def cases(setting: Setting) -> Iterator[KernelCase]:
    observe, reference = setting.both("kernels.observed_weight", "observed_weight")
    shape, device = setting.shape, setting.device
    for context in contexts(setting):
        for kind, width in (("last", min(NUM_LAST, context)), ("scattered", -(-context // SCATTERED_SHARE))):
            has_rival = shape.num_heads * width * context <= MAX_SCORES

            def make(
                context: int = context, kind: str = kind, width: int = width, has_rival: bool = has_rival
            ) -> Operands:
                queries = setting.normal(shape.num_heads, width, shape.head_dim)
                keys = setting.normal(shape.num_kv_heads, context, shape.head_dim)
                positions = torch.arange(context - width, context, device=device).expand(shape.num_heads, -1)
                if kind == "scattered":
                    order = torch.rand(shape.num_heads, context, device=device).argsort(dim=1)
                    positions = order[:, :width].sort(dim=1).values
                shares = torch.full(positions.shape, 1 / width, device=device)
                wanted = (queries, keys, positions, shares, shape.head_dim**-0.5)
                return Operands(
                    lambda: observe(*wanted),
                    (lambda: reference(*wanted)) if has_rival else None,
                    lambda: relative_error(observe(*wanted), reference(*wanted)),
                )

            num_bytes = num_bytes_of(
                setting.empty(shape.num_kv_heads, context, shape.head_dim),
                setting.empty(shape.num_heads, width, shape.head_dim),
            )
            num_bytes += 4 * shape.num_kv_heads * context
            label = f"{shape.num_heads} x {width} {kind}, {context}"
            rival = "the same in tiles of PyTorch" if has_rival else None
            yield KernelCase("observed_weight", label, num_bytes, make, rival)
