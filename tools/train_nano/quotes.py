"""The quote task: continue a quotation to the end of its sentence. It works on any text, with nothing hidden in it."""

from __future__ import annotations

from random import Random

import numpy as np

from carrel.evaluation.documents import Codec, Document, DocumentError, Prompt, TokenizedBook, ask, build

QUOTE_QUESTIONS = (
    'Continue the quote: "{quoted}"',
    'Continue the quote: "{quoted}"',
    'Complete the sentence from the text: "{quoted}"',
    'What comes after "{quoted}"?',
    'How does this sentence go on: "{quoted}"',
)


def quote_prompt(
    codec: Codec, book: TokenizedBook, num_tokens: int, rng: Random, style: str = "chat"
) -> Prompt:
    """A prompt of about `num_tokens` tokens of plain book text that asks to continue a quotation from it."""
    document = build(codec, book, (), num_tokens - 48, rng)
    question, answer = quote(codec, book, document, rng)
    return ask(codec, document, question, answer, "quote", style)


def quote(
    codec: Codec, book: TokenizedBook, document: Document, rng: Random, tries: int = 20
) -> tuple[str, str]:
    """A question that quotes 6 to 12 words of the document, and the words that follow, up to the sentence's end.

    Raises DocumentError when no sentence of the document is of a fit length.
    """
    low, high = np.searchsorted(book.sentence_starts, [document.start, document.end - 1])
    for _ in range(tries if high - low > 1 else 0):
        place = rng.randrange(low, high - 1)
        span = book.token_ids[book.sentence_starts[place] : book.sentence_starts[place + 1]]
        words = codec.decode(span).split(" ")[1:]
        if not 10 <= len(words) <= 45 or any("\n" in word or '"' in word or not word for word in words):
            continue
        num_answer = rng.randint(4, min(14, len(words) - 6))
        num_quoted = rng.randint(6, min(12, len(words) - num_answer))
        quoted = " ".join(words[-num_answer - num_quoted : -num_answer])
        form = rng.choice(QUOTE_QUESTIONS)
        return form.format(quoted=quoted), " ".join(words[-num_answer:])
    raise DocumentError("no sentence to quote in the document: ask for a longer one")
