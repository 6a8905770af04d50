"""What a chat request sends and what comes back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """`role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatOptions:
    """What every request of a conversation carries. None leaves the choice to the server."""

    max_tokens: int | None = None
    temperature: float | None = None
    policy: str | None = None
    budget: float | int | None = None


@dataclass(frozen=True)
class Model:
    """A served model; `max_model_len` is 0 when the server does not say."""

    id: str
    max_model_len: int


@dataclass(frozen=True)
class Delta:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True)
class Usage:
    """What the answer cost. The fields from `policy` on are Carrel's own; another server sends none."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    policy: str = ""
    budget_tokens: int = 0
    context_tokens: int = 0
    cached_tokens: int = 0
    offloaded_tokens: int = 0
    attended_tokens: float = 0.0
    hit_rate: float = 0.0
    bytes_moved: int = 0
