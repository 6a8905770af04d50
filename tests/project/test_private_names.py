"""Tests go through public names: what begins with an underscore may change without one of them noticing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from checkout import sources

# Of other projects, where they have no public name for it.
ALLOWED = {
    "_actions",  # argparse: the options of a parser
    "_cdata",  # torch: a storage's address
    "_getframe",  # sys: who calls
    "_convert_float",  # triton: what its interpreter does over and over
    "_get_np_dtype",
    "_patch_lang",
    "_local_scalar_dense",  # torch's operators that read data
    "_unique2",
    "_sleep",  # torch.cuda: keeps a device busy
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in ALLOWED


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private name of another object; a class's own are its business."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            inherited = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            if not (own or inherited):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))


def test_tests_read_no_private_names() -> None:
    found = [
        f"{file}:{line}: {name}"
        for file, text in sources("tests")
        for line, name in private_names(ast.parse(text))
    ]
    assert found == []


def test_private_names_are_seen() -> None:
    seen = ast.parse("from a import _b, c\nself._d\nsuper()._e()\nf._g\nh.__class__\nself.i._j")
    assert {name for _, name in private_names(seen)} == {"_b", "f._g", "self.i._j"}
