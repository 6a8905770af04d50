"""Generate the gRPC stubs from `proto/` into the packages of the same name.

`python -m tools.gen_stubs [--out DIR] [--check]`. The stubs are committed; a test compares them with a fresh
run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]


def generate(out: Path) -> list[Path]:
    """Write every stub under `out` and return the files written. Raises RuntimeError when protoc refuses."""
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    arguments = [
        "protoc",
        f"-I{ROOT / 'proto'}",
        f"-I{resources.files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *map(str, protos),
    ]
    if status := protoc.main(arguments):
        raise RuntimeError(f"protoc refused {[proto.name for proto in protos]} with status {status}")
    folders = {out / proto.parent.relative_to(ROOT / "proto") for proto in protos}
    for folder in folders:
        (folder / "__init__.py").touch()
    return sorted(file for folder in folders for file in folder.glob("*.py*"))


def drift(root: Path = ROOT) -> list[str]:
    """Names of the stubs under `root` that a fresh run writes otherwise, or would not write at all."""
    with tempfile.TemporaryDirectory(prefix="stubs-") as folder:
        fresh = {file.relative_to(folder): file.read_bytes() for file in generate(Path(folder))}
    folders = {file.parent for file in fresh}
    committed = {
        file.relative_to(root): file.read_bytes()
        for stub_folder in folders
        for file in (root / stub_folder).glob("*.py*")
    }
    return sorted(
        str(name) for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT, help="write below this folder (default: the checkout)"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when committed stubs differ"
    )
    arguments = parser.parse_args()
    if arguments.check:
        if names := drift():
            sys.exit(f"stubs differ from proto/: {', '.join(names)}; run `make stubs`")
        return
    for file in generate(arguments.out):
        print(file.relative_to(arguments.out))


if __name__ == "__main__":
    main()
