"""Questions of a soak: prompts of token ids with greedy answers that are known from asking alone."""

from __future__ import annotations

import math
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import takewhile
from random import Random
from typing import Any

from benchmarks.load.client import LoadClient

# What a question alone asks for besides, where near ties are told from wrong answers.
MARGINS = {"logprobs": 2}


@dataclass(frozen=True)
class Question:
    """A prompt of token ids, the policy that is asked for (None: the server's), and the answer's most tokens."""

    prompt: tuple[int, ...]
    policy: str | None
    max_tokens: int

    def body(self, model: str, **extra: Any) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **extra,
        }
        if self.policy is not None:
            body["carrel"] = {"policy": self.policy}
        return body


async def questions(
    client: LoadClient, count: int, most_tokens: int, policies: tuple[str | None, ...], seed: str
) -> list[Question]:
    """Short ones and long ones, up to `most_tokens`, over all policies."""
    rng, made = Random(seed), []
    for index in range(count):
        longest = most_tokens if index % 4 == 0 else max(16, most_tokens // 16)
        ids = await client.token_ids(rng.randint(max(8, longest // 4), longest), f"{seed}:{index}")
        made.append(Question(tuple(ids), policies[index % len(policies)], rng.choice((16, 32, 64))))
    return made


@dataclass
class Answer:
    """The pieces of an answer as they come, kept where the stream breaks off too. tokens: their ids. margins: how much
    likelier each token was than the second best, in nats, where the question asks for `MARGINS`. first_at: of the first
    piece, by time.monotonic."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    first_at: float | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def departure(self, alone: Answer, is_whole: bool) -> tuple[int, float] | None:
        """Where this answer (or as much of it as came) leaves the one alone, in tokens, and how much likelier than the
        second best that one's token was there, in nats: infinite where no token differs, but their number or the text.
        None where nothing differs."""
        expected = alone.tokens if is_whole else alone.tokens[: len(self.tokens)]
        text = alone.text if is_whole else alone.text[: len(self.text)]
        if (self.tokens, self.text) == (expected, text):
            return None
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, expected, strict=False))
        )
        return same, alone.margins[same] if same < min(len(self.tokens), len(alone.margins)) else math.inf

    async def read(self, client: LoadClient, body: dict[str, Any], most: int | None = None) -> None:
        """To its end, or until `most` pieces have come. Raises RequestFailed."""
        async with aclosing(client.pieces(body)) as found:
            async for piece in found:
                for choice in piece.get("choices", ()):
                    self.pieces.append(choice["text"])
                    self.tokens += choice.get("token_ids") or ()
                    self.margins += map(_margin, (choice.get("logprobs") or {}).get("top_logprobs", ()))
                if self.pieces and self.first_at is None:
                    self.first_at = time.monotonic()
                if most is not None and len(self.pieces) >= most:
                    break


def _margin(likeliest: dict[str, float | None] | None) -> float:
    """Between the two best; 0 of two tokens of one text, which are told as one."""
    best = sorted((value for value in (likeliest or {}).values() if value is not None), reverse=True)
    return best[0] - best[1] if len(best) > 1 else 0.0
