"""Sums of the hash buckets of ProtoKV's irregular keys: so few that only the launches count."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernels.base import KernelCase, Operands, Setting, relative_error
from gpu_worker.policies.protokv.hash_buckets.reference import RandomFeatures

# ProtoKV's own, for any context; and as many as the kernel takes
NUM_KEYS = (48, 512)
NUM_BUCKETS = 16
GAMMA = 1.0


def cases(setting: Setting) -> Iterator[KernelCase]:
    add, reference = setting.both("policies.protokv.hash_buckets", "bucket_sums")
    shape = setting.shape
    for num_keys in NUM_KEYS:

        def make(num_keys: int = num_keys) -> Operands:
            keys = setting.normal(shape.num_kv_heads, num_keys, shape.head_dim)
            features = RandomFeatures.draw(keys, NUM_BUCKETS, GAMMA, seed=0)
            return Operands(
                lambda: add(keys, features),
                lambda: reference(keys, features),
                lambda: relative_error(add(keys, features), reference(keys, features)),
            )

        numbers = NUM_BUCKETS * shape.head_dim + (NUM_BUCKETS - 1).bit_length() * (shape.head_dim + 1)
        num_bytes = shape.num_kv_heads * (num_keys * shape.head_dim * setting.dtype.itemsize + 4 * numbers)
        label = f"{shape.num_kv_heads} x {num_keys} in {NUM_BUCKETS}"
        yield KernelCase("bucket_sums", label, num_bytes, make, "the same in PyTorch")
