"""Names of policies in messages: the plain ones, and the nearest to a name that no policy has."""

from __future__ import annotations

from collections.abc import Collection

from carrel.process.options import did_you_mean


def choices(asked: str, known: Collection[str]) -> str:
    """The end of an error about an unknown name: the plain names of `known`, and the nearest of all.

    A variant or wrapped form, such as `snapkv+adakv`, is left out where its method is known too.
    """
    plain = [name for name in known if "+" not in name or name.partition("+")[0] not in known]
    return f"choose one of {', '.join(plain)}{did_you_mean(asked, known)}"
