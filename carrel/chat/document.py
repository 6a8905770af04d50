"""The file that a conversation is about."""

from __future__ import annotations

from pathlib import Path

from carrel.process.options import OptionError


def read_document(path: Path) -> str:
    """A text file's content. Raises OptionError when it is missing, empty or no UTF-8 text."""
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise OptionError(f"cannot read {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise OptionError(f"{path} is not UTF-8 text (byte {exc.start}); convert it first") from exc
    if "\0" in text:
        raise OptionError(f"{path} is a binary file, not text")
    if not text.strip():
        raise OptionError(f"{path} is empty")
    return text
