"""Questions about texts, for any model: written as text and cut to a length by the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

from carrel.errors import EvaluationError
from carrel.evaluation.questions import Question
from carrel.evaluation.tasks import TEXT_TASKS, Filler, Text
from gateway.errors import InvalidRequest
from gateway.exchange import Message

if TYPE_CHECKING:
    from gateway.tokenizer import Tokenizer


class TextSuite:
    """Draws question `index` of a task at a length; it depends on tokenizer, filler, seed and these three alone."""

    def __init__(self, tokenizer: Tokenizer, filler: Filler, seed: int, is_chat: bool = False) -> None:
        """is_chat: asked as a user's message in the model's chat template; else as plain text to go on with."""
        self._tokenizer = tokenizer
        self._filler = filler
        self._seed = seed
        self._is_chat = is_chat

    def question(self, task: str, length: int, index: int) -> Question:
        """A prompt that leaves the task's answer tokens of `length`. Raises EvaluationError where that is too short."""
        writer, seed = TEXT_TASKS[task], f"{self._seed}:{task}:{length}:{index}"

        def write(num_chars: int) -> Text:
            return writer.write(num_chars, Random(seed), self._filler)

        room = length - writer.answer_tokens
        # the writer is asked again for the text of which the length fits
        sizes: dict[int, int] = {}

        def encode(num_chars: int) -> tuple[int, ...]:
            token_ids = self._encode(*self._framed(write(num_chars)))
            sizes[len(token_ids)] = num_chars
            return token_ids

        token_ids = tuple(fit(encode, room))
        text = write(sizes[len(token_ids)])
        context, _ = self._framed(text)
        split = _common_prefix(self._encode(context, ""), token_ids)
        return Question(
            index,
            text.kind,
            text.answers,
            token_ids[:split],
            token_ids[split:],
            writer.answer_tokens,
        )

    def _framed(self, text: Text) -> tuple[str, str]:
        """Return the part that P2 prefills, and the part that follows: plain, or the parts of a chat's prompt."""
        if not self._is_chat:
            return text.context, text.question
        try:
            prompt = self._tokenizer.render_chat([Message("user", text.context + text.question)], {})
        except InvalidRequest as exc:
            raise EvaluationError(f"--chat: {exc}") from exc
        before, found, after = prompt.rpartition(text.question)
        if not found or not before.endswith(text.context):
            raise EvaluationError("--chat: the model's chat template changes what it is given; leave it out")
        return before, found + after

    def _encode(self, context: str, question: str) -> tuple[int, ...]:
        # a template writes the begin token itself
        return self._tokenizer.encode(context + question, add_special_tokens=not self._is_chat)


def _common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Where they begin to differ: a token over the border belongs to the question."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


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
