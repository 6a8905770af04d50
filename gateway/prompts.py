"""Prompts to token ids, with the bounds that keep a huge prompt cheap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from carrel.process.options import did_you_mean
from carrel.process.request_limits import context_overflow
from gateway.errors import InvalidRequest, invalid_requests
from gateway.exchange import ChatRequest, Message, TokenIds
from gateway.heavy_work import SHORT_SIZE, CallerWork
from gateway.tokenizer import Tokenizer
from gateway.tool_calls.written import tool_json

MAX_ROLE_CHARS = 64
ROLES = ("system", "developer", "user", "assistant", "tool")
# what a message, a call or a value costs a template beside its text, in characters
RECORD_CHARS = 64


def check_text(text: str, param: str) -> None:
    """Raises InvalidRequest for text that no tokenizer should see."""
    if "\x00" in text:
        raise InvalidRequest("The text holds a NUL character; remove it.", param)


def chat_size(request: ChatRequest) -> int:
    """About how many characters a template reads; of tools and arguments only whether they are long."""
    tools = () if request.tools is None else request.tools.tools
    values = [request.template_arguments, *((tool.description, tool.parameters) for tool in tools)]
    return _messages_size(request.messages) + _values_size(values)


def _messages_size(messages: Iterable[Message]) -> int:
    return sum(each.num_chars + RECORD_CHARS * (1 + len(each.tool_calls)) for each in messages)


def _values_size(values: list[Any]) -> int:
    """Estimate the size of JSON values, counting only until they exceed the short size."""
    size, left = 0, list(values)
    while left and size <= SHORT_SIZE:
        size += RECORD_CHARS
        match left.pop():
            case str() as text:
                size += len(text)
            case Mapping() as fields:
                left += [*fields.keys(), *fields.values()]
            case [*_] as items:
                left += items
    return size


class PromptEncoder:
    """Tokenizes in threads: the event loop stays free. `max_tokens` is only for the text of an overflow."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def chat(
        self,
        request: ChatRequest,
        max_model_len: int,
        max_tokens: int,
        work: CallerWork,
    ) -> TokenIds:
        """The token ids of a chat by the model's template. Raises InvalidRequest about `messages`, TooManyRequests and
        Overloaded."""
        messages = request.messages
        if not messages:
            raise InvalidRequest("messages is empty: give at least one message.", "messages")
        for message in messages:
            self._check_role(message.role)
            check_text(message.content, "messages")
        num_chars = sum(len(message.content) for message in messages)
        self._check_chars(num_chars, max_model_len, max_tokens, "messages")
        text = await work.run(
            chat_size(request),
            self._tokenizer.render_chat,
            messages,
            request.template_arguments,
            request.adds_generation_prompt,
            request.continues_final,
            [] if request.tools is None else [tool_json(tool) for tool in request.tools.tools],
        )
        # the template writes the special tokens itself
        adds_special = bool(request.options.add_special_tokens)
        return await self.text(text, adds_special, max_model_len, max_tokens, "messages", work)

    async def text(
        self,
        text: str,
        add_special_tokens: bool,
        max_model_len: int,
        max_tokens: int,
        param: str,
        work: CallerWork,
    ) -> TokenIds:
        """The token ids of a text. Raises InvalidRequest about `param`, TooManyRequests and Overloaded."""
        check_text(text, param)
        self._check_chars(len(text), max_model_len, max_tokens, param)
        return await work.run(len(text), self._tokenizer.encode, text, add_special_tokens)

    def _check_role(self, role: str) -> None:
        """Refuse a role that neither clients nor the chat template know: many templates write any role as it is."""
        if role in ROLES:
            return
        if not 0 < len(role) <= MAX_ROLE_CHARS:
            raise InvalidRequest(f"A role must have 1 to {MAX_ROLE_CHARS} characters.", "messages")
        check_text(role, "messages")
        template = self._tokenizer.chat_template or ""
        if f"'{role}'" not in template and f'"{role}"' not in template:
            hint = did_you_mean(role, ROLES) or f": use one of {', '.join(ROLES)}."
            raise InvalidRequest(f"There is no role {role!r}{hint}", "messages")

    def _check_chars(self, num_chars: int, max_model_len: int, max_tokens: int, param: str) -> None:
        """Refuse what cannot fit whatever its tokens are, before any is made: tokenizing it would cost seconds."""
        num_tokens = num_chars // self._tokenizer.max_chars_per_token
        if num_tokens > max_model_len:
            with invalid_requests():
                raise context_overflow(max_model_len, max_tokens, f"at least {num_tokens}", param)
