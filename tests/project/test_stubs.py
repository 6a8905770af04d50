"""The committed gRPC stubs are what `proto/` generates today."""

from __future__ import annotations

from pathlib import Path

from tools.gen_stubs import ROOT, drift, generate


def test_committed_stubs_are_fresh(tmp_path: Path) -> None:
    fresh = generate(tmp_path)
    assert fresh, "protoc wrote nothing"
    for file in fresh:
        name = file.relative_to(tmp_path)
        assert (ROOT / name).read_bytes() == file.read_bytes(), f"{name} drifted: run `make stubs`"


def test_drift_names_changed_missing_and_left_over_stubs(tmp_path: Path) -> None:
    generate(tmp_path)
    assert drift(tmp_path) == []
    (tmp_path / "gateway/v1/chat_pb2.py").write_text("# edited by hand\n")
    (tmp_path / "kv_store/v1/kv_store_pb2.pyi").unlink()
    (tmp_path / "gpu_worker/v1/old_pb2.py").touch()
    assert drift(tmp_path) == [
        "gateway/v1/chat_pb2.py",
        "gpu_worker/v1/old_pb2.py",
        "kv_store/v1/kv_store_pb2.pyi",
    ]
