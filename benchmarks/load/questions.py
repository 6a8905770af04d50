"""What a soak asks: prompts of token ids, whose greedy answers are known from asking alone."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.load.client import LoadClient


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
    """The pieces of an answer as they come, kept where the stream breaks off too. first_at: of the first one, by
    time.monotonic."""

    pieces: list[str] = field(default_factory=list)
    first_at: float | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    async def read(self, client: LoadClient, body: dict[str, Any], most: int | None = None) -> None:
        """To its end, or until `most` pieces have come. Raises RequestFailed."""
        async with aclosing(client.pieces(body)) as found:
            async for piece in found:
                self.pieces += [choice["text"] for choice in piece.get("choices", ())]
                if self.pieces and self.first_at is None:
                    self.first_at = time.monotonic()
                if most is not None and len(self.pieces) >= most:
                    break
