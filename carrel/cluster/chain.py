"""Prompts as chains of hashes: one link for each block of tokens, over all tokens up to the block's last.

The worker's store names its slabs in the same way; blocks here are short, so that routing needs to know no layout.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 64
# what decides a route; two prompts that are alike for so long are not told apart
MAX_BLOCKS = 4096


def prompt_chain(caller: bytes, token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """The links of a prompt's whole blocks. `caller` salts them: callers that may not share a cache share no link."""
    ids = array("I", token_ids[: BLOCK_TOKENS * MAX_BLOCKS])
    link, links = b"", []
    for begin in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        content = ids[begin : begin + BLOCK_TOKENS].tobytes()
        link = hashlib.blake2b(content, key=link or caller[:64], digest_size=16).digest()
        links.append(link)
    return tuple(links)


def session_link(caller: bytes, session_id: str) -> bytes:
    """A session's name in routing: it reveals neither the session nor `caller`; b"" for none."""
    if not session_id:
        return b""
    return hashlib.blake2b(session_id.encode(), key=caller[:64], digest_size=16, person=b"session").digest()
