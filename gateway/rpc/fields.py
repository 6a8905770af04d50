"""The fields of a message, looked at before it is decoded: that is one call, makes hundreds of bytes of two, and says
nothing of those that it does not know."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

from gateway.errors import InvalidRequest
from gateway.json_limits import check_count

# a message of a chat is three at least
MAX_FIELDS = 2**15


def check_fields(data: bytes, kind: Descriptor) -> None:
    """Raises TooLarge where it has too many, those of messages within it among them, and InvalidRequest for one that
    its kind does not have. What is no message at all is left to who decodes it."""
    left, count = [(0, len(data), kind)], 0
    try:
        while left:
            at, end, kind = left.pop()
            while at < end:
                count += 1
                check_count(count, "fields or more", MAX_FIELDS)
                tag, at = _varint(data, at)
                field = kind.fields_by_number.get(tag >> 3)
                if field is None:
                    raise InvalidRequest(
                        f"{kind.name} has no field {tag >> 3} here: use the chat.proto of this server's version."
                    )
                # the format's wire types: a number, 8 bytes, so many bytes, 4 bytes
                match tag & 7:
                    case 0:
                        _, at = _varint(data, at)
                    case 1:
                        at += 8
                    case 2:
                        size, at = _varint(data, at)
                        if field.message_type is not None:
                            left.append((at, at + size, field.message_type))
                        at += size
                    case 5:
                        at += 4
    except IndexError:
        return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number there, and where it ends."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
