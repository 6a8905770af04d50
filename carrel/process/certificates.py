"""Certificates by which processes know each other over TLS."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """PEM: a key, its certificate (and chain), and the certificates by which the other side is known. For mutual TLS:
    both sides have one."""

    key: bytes
    certificate: bytes
    root: bytes


def read_identity(files: Mapping[str, Path | None]) -> Identity | None:
    """files: of the key, of the certificate and of the other side's certificates, in this order, by their options.

    None without any of them. Raises ValueError where one is missing or cannot be used.
    """
    given = {flag: path for flag, path in files.items() if path is not None}
    if not given:
        return None
    if len(given) < len(files):
        missing = ", ".join(flag for flag in files if flag not in given)
        raise ValueError(f"{', '.join(given)}: mutual TLS needs {missing} too; give all or none")
    (key_flag, key), (certificate_flag, certificate), (root_flag, root) = given.items()
    check_pair(key_flag, key, certificate_flag, certificate)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(root)
        return Identity(key.read_bytes(), certificate.read_bytes(), root.read_bytes())
    except OSError as error:
        raise ValueError(f"{root_flag} {root} cannot be used: {error}") from error


def check_pair(key_flag: str, key: Path | None, certificate_flag: str, certificate: Path | None) -> None:
    """Check that both files exist and belong together, or that neither was given. Raises ValueError."""
    if (key is None) != (certificate is None):
        raise ValueError(f"{key_flag} and {certificate_flag} belong together: give both or none")
    if certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        raise ValueError(
            f"{certificate_flag} {certificate} and {key_flag} {key} cannot be used: {error}"
        ) from error
