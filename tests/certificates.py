"""A certificate for the tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def sign_oneself(folder: Path) -> tuple[Path, Path]:
    """A key, and a certificate for localhost that it signed itself."""
    key, found = folder / "key.pem", folder / "certificate.pem"
    line = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    line += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(found)]
    subprocess.run(line, check=True, capture_output=True)
    return key, found
