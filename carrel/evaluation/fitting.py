"""Documents of an exact length in tokens, of writers that know characters only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carrel.errors import EvaluationError

# That a document may be shorter, as a share of what was asked and in tokens.
SLACK_SHARE, SLACK_TOKENS = 0.002, 8
MAX_TRIES = 6
CHARS_PER_TOKEN = 3.5


def fit(write: Callable[[int], Sequence[int]], num_tokens: int) -> Sequence[int]:
    """The longest document found that has at most so many tokens, a few fewer as a rule.

    write: the token ids of a document of about so many characters; the same for the same number. Raises EvaluationError
    where even the shortest is too long.
    """
    enough = num_tokens - max(SLACK_TOKENS, int(SLACK_SHARE * num_tokens))
    below: tuple[int, Sequence[int]] | None = None
    above: tuple[int, int] | None = None
    num_chars = int(num_tokens * CHARS_PER_TOKEN)
    for _ in range(MAX_TRIES):
        found = write(num_chars)
        if len(found) > num_tokens:
            above = (num_chars, len(found))
        elif below is None or len(found) >= len(below[1]):
            below = (num_chars, found)
            if len(found) >= enough:
                break
        num_chars = _next(below and (below[0], len(below[1])), above, enough)
    if below is None:
        raise EvaluationError(
            f"no document of {num_tokens} tokens: the shortest has more; ask for a longer one"
        )
    return below[1]


def _next(below: tuple[int, int] | None, above: tuple[int, int] | None, wanted: int) -> int:
    """Characters to try next: on the line through what was found, towards the middle where that helped nobody."""
    if below is None:
        assert above is not None
        return int(above[0] * min(0.95, wanted / above[1])) if above[0] > 1 else 0
    if above is None:
        return int(below[0] * max(1.02, wanted / max(1, below[1]))) + 1
    if above[0] <= below[0] + 1:
        return below[0]
    share = (wanted - below[1]) / max(1, above[1] - below[1])
    return int(below[0] + min(0.9, max(0.1, share)) * (above[0] - below[0]))
