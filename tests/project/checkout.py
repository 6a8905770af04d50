"""The checkout, as the rules of this folder read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("carrel", "gateway", "gpu_worker", "kv_store")


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each Python file of these folders that no tool wrote."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not file.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
