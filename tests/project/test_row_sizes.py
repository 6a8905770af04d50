"""Sizes and types of K|V rows come from `RowFormat`: no other file doubles a head's size or lists element types."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from checkout import PACKAGES, sources

# The record itself, and its element types as those of PyTorch and NumPy.
HOMES = ("kv_store/client/row_format.py", "gpu_worker/row_format.py", "kv_store/index/keys.py")

HEAD_SIZES = {"d", "half_words", "head_dim", "head_size", "key_bytes"}
ELEMENTS = {"bf16", "fp16", "fp32"}
# The last axis of rows, cut into halves, and the old second places.
HALVED = re.compile(
    r"\brow_(bytes|elements)\b // 2|\brows(\[[^]]*\])?\.shape\[(-1|2|3)\] // 2|\brows\.chunk\(2\b"
)
TABLES = re.compile(r"\b(ITEM_SIZES|ROW_TYPES)\b")


def second_places(source: str) -> list[str]:
    """Expressions that work out what `RowFormat` knows."""
    tree = ast.parse(source)
    found = [ast.unparse(node) for node in ast.walk(tree) if is_doubled_head(node) or is_element(node)]
    return found + [match.group() for pattern in (HALVED, TABLES) for match in pattern.finditer(source)]


def is_doubled_head(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    parts = list(factors(node))
    is_head = any(name_of(part).lower() in HEAD_SIZES for part in parts)
    return is_head and any(isinstance(part, ast.Constant) and part.value == 2 for part in parts)


def is_element(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ELEMENTS


def factors(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from factors(node.left)
        yield from factors(node.right)
    else:
        yield node


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def test_no_other_file_works_out_a_row() -> None:
    found = {name: second_places(text) for name, text in sources("benchmarks", *PACKAGES)}
    assert {name: places for name, places in found.items() if places and name not in HOMES} == {}
    assert all(found[name] for name in HOMES)


@pytest.mark.parametrize(
    "source",
    [
        "block_bytes = BLOCK_SIZE * 2 * config.head_dim * dtype.itemsize",
        "pool = SlotPool(1, self.shape.head_dim * 2, dtype, device)",
        "target = pool + slot * (2 * HEAD_DIM) + dims",
        "token_bytes = num_layers * num_kv_heads * (2 * head_dim) * 4",
        "keys, values = rows.split(rows.shape[2] // 2, dim=2)",
        "keys, values = rows.chunk(2, dim=-1)",
        "key = raw[: layout.row_format.row_bytes // 2]",
        "SIZES = {'bf16': 2}",
        "row_type = ROW_TYPES[dtype]",
    ],
)
def test_second_places_are_found(source: str) -> None:
    assert second_places(source)


@pytest.mark.parametrize(
    "source",
    [
        "num_bytes = 2 * shape.head_dim**2",
        "width = (num_heads + 2 * num_kv_heads) * head_dim",
        "half = rows.shape[1] // 2",
        "gate, up = gate_up.chunk(2, dim=-1)",
        "num_bytes = num_rows * row_format.row_bytes",
    ],
)
def test_other_sizes_are_left_alone(source: str) -> None:
    assert not second_places(source)
