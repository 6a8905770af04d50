"""The token of a store that listens beyond its machine: what it asks for, and what its workers show."""

from __future__ import annotations

from pathlib import Path

# A shorter one could be guessed.
MIN_CHARACTERS = 16


def read_token(token: str, file: str) -> str:
    """The token itself, or the one that `file` holds; "" without both. Raises ValueError, which never tells a token."""
    if file:
        if token:
            raise ValueError(f"--store-token-file {file}: a token is given too; give one of both")
        try:
            token = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--store-token-file {file}: cannot be read ({error})") from error
        if not token:
            raise ValueError(f"--store-token-file {file}: the file is empty")
    if token and (len(token) < MIN_CHARACTERS or not token.isascii() or not token.isprintable()):
        raise ValueError(f"the store's token must have {MIN_CHARACTERS} printable ASCII characters or more")
    return token
