"""Generate the gRPC stubs from `proto/` into the packages of the same name.

`python -m tools.gen_stubs [--out DIR]`; the stubs are committed and a test compares them with a fresh run.
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT)
    out = parser.parse_args().out
    for file in generate(out):
        print(file.relative_to(out))


if __name__ == "__main__":
    main()
