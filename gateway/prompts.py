"""Prompts to token ids, with the bounds that keep a huge prompt cheap."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from gateway.errors import ContextOverflow, InvalidRequest
from gateway.records import Message, Scalar, WorkerInfo
from gateway.sampling import check_text, check_token_ids
from gateway.tokenizer import Tokenizer

MAX_ROLE_CHARS = 64


class PromptEncoder:
    """Tokenizes in threads: the event loop stays free. `max_tokens` is only for the text of an overflow."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def chat(
        self, messages: Sequence[Message], arguments: Mapping[str, Scalar], info: WorkerInfo, max_tokens: int
    ) -> tuple[int, ...]:
        """The token ids of a chat by the model's template. Raises InvalidRequest about `messages`."""
        if not messages:
            raise InvalidRequest("messages is empty: give at least one message.", "messages")
        for message in messages:
            if not 0 < len(message.role) <= MAX_ROLE_CHARS:
                raise InvalidRequest(f"A role must have 1 to {MAX_ROLE_CHARS} characters.", "messages")
            check_text(message.role, "messages")
            check_text(message.content, "messages")
        num_chars = sum(len(message.content) for message in messages)
        self._check_chars(num_chars, info, max_tokens, "messages")
        text = await asyncio.to_thread(self._tokenizer.render_chat, messages, arguments)
        # the template writes the special tokens itself
        return await self.text(text, False, info, max_tokens, "messages")

    async def text(
        self, text: str, add_special_tokens: bool, info: WorkerInfo, max_tokens: int, param: str
    ) -> tuple[int, ...]:
        """The token ids of a text. Raises InvalidRequest about `param`."""
        check_text(text, param)
        self._check_chars(len(text), info, max_tokens, param)
        token_ids = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens)
        return self.ids(token_ids, info, param)

    def ids(self, token_ids: tuple[int, ...], info: WorkerInfo, param: str) -> tuple[int, ...]:
        """Token ids as they are, when the model knows all of them."""
        if not token_ids:
            raise InvalidRequest("The prompt is empty: give at least one token.", param)
        check_token_ids(token_ids, info.vocab_size, param)
        return token_ids

    def _check_chars(self, num_chars: int, info: WorkerInfo, max_tokens: int, param: str) -> None:
        """Refuse what cannot fit whatever its tokens are, before any is made: tokenizing it would cost seconds."""
        num_tokens = num_chars // self._tokenizer.max_chars_per_token
        if num_tokens > info.max_model_len:
            raise ContextOverflow(info.max_model_len, max_tokens, num_tokens, param, is_lower_bound=True)
