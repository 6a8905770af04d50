"""Questions about texts, for any model: written as text and cut to a length by the model's own tokenizer."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from carrel.errors import EvaluationError
from carrel.evaluation.fitting import fit
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
            writer.metric,
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
