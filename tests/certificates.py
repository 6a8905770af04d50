"""A certificate for the tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def sign_oneself(folder: Path, *addresses: str) -> tuple[Path, Path]:
    """A key, and a certificate for localhost and these addresses that it signed itself."""
    key, found = folder / "key.pem", folder / "certificate.pem"
    line = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    names = ",".join(f"IP:{address}" for address in ("127.0.0.1", *addresses))
    line += ["-addext", f"subjectAltName=DNS:localhost,{names}", "-keyout", str(key), "-out", str(found)]
    subprocess.run(line, check=True, capture_output=True)
    return key, found
