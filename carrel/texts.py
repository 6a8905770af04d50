"""Text files that a user names."""

from __future__ import annotations

import lzma
from pathlib import Path

from carrel.process.options import OptionError


def read_text(path: Path) -> str:
    """Return a UTF-8 text with Unix line ends. A file whose name ends in .xz is unpacked.

    Raises OptionError when it is missing, empty or not text.
    """
    try:
        packed = path.expanduser().read_bytes()
        text = (lzma.decompress(packed) if path.suffix == ".xz" else packed).decode("utf-8-sig")
    except OSError as exc:
        raise OptionError(f"cannot read {path}: {exc.strerror}") from exc
    except lzma.LZMAError as exc:
        raise OptionError(f"{path} is no xz file, or a damaged one: {exc}") from exc
    except UnicodeDecodeError as exc:
        raise OptionError(f"{path} is not UTF-8 text (byte {exc.start}); convert it first") from exc
    if "\0" in text:
        raise OptionError(f"{path} is a binary file, not text")
    if not text.strip():
        raise OptionError(f"{path} is empty")
    return text.replace("\r\n", "\n").replace("\r", "\n")
