"""How much JSON may hold, counted before it is parsed: parsing is one call, and holds up everybody else."""

from __future__ import annotations

from gateway.errors import TooLarge

# Each is some microseconds until it is a record: a message is one, a part of its content, a call of a tool, ...
MAX_NESTED = 2**14
# names of fields are texts too
MAX_TEXTS = 2**16
# whatever a comma stands between
MAX_VALUES = 2**17


def check_json(text: bytes, num_more_values: int = 0) -> int:
    """The number of values, at least. Raises TooLarge. The counts are exact up to where it stops to be JSON, and what
    follows is not parsed."""
    # what a backslash stands before ends no text
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    check_count(plain.count(b'"') // 2, "texts, names of fields among them", MAX_TEXTS)
    outside = b"".join(plain.split(b'"')[::2])
    check_count(outside.count(b"{") + outside.count(b"["), "objects and lists", MAX_NESTED)
    num_values = outside.count(b",") + 1
    check_count(num_values, "values", MAX_VALUES + num_more_values)
    return num_values


def check_count(count: int, what: str, most: int) -> None:
    """Raises TooLarge."""
    if count > most:
        raise TooLarge(
            f"The request has {count} {what}: at most {most} are read. Join messages, or parts of their content, or "
            "send several requests."
        )
