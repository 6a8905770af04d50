"""Turns of `/v1/messages` to the service's messages: calls and their answers are blocks of turns there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby

from gateway.errors import InvalidRequest
from gateway.exchange import Message, ToolCall
from gateway.rest.messages.schemas import Block, Content, CountBody


def read_turns(body: CountBody) -> tuple[Message, ...]:
    """Text, that of blocks and of turns of one role in a row with line breaks between, the system's first. Raises
    InvalidRequest for what is neither text nor a call."""
    messages = [] if body.system is None else [Message("system", _text(_blocks(body.system)))]
    names: dict[str, str] = {}
    for role, turns in groupby(body.messages, lambda turn: turn.role):
        blocks = [block for turn in turns for block in _blocks(turn.content)]
        if role == "assistant":
            messages.append(_answer(blocks, names))
        else:
            messages.extend(_question(role, blocks, names))
    return tuple(messages)


def _answer(blocks: list[Block], names: dict[str, str]) -> Message:
    """names: of the calls' tools by their ids, filled here."""
    calls = []
    for block in blocks:
        if block.type == "tool_use":
            if block.id is None or block.name is None:
                raise InvalidRequest("A block of type tool_use needs id and name.", "messages")
            names[block.id] = block.name
            calls.append(ToolCall(block.id, block.name, json.dumps(block.input or {}, ensure_ascii=False)))
    thoughts = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    said = (block for block in blocks if block.type not in ("tool_use", "thinking", "redacted_thinking"))
    return Message("assistant", _text(said), tuple(calls), reasoning=thoughts or None)


def _question(role: str, blocks: list[Block], names: dict[str, str]) -> Iterator[Message]:
    """Answers to calls first, as they come, then what else is said."""
    said = []
    for block in blocks:
        if block.type != "tool_result":
            said.append(block)
            continue
        if block.tool_use_id is None:
            raise InvalidRequest("A block of type tool_result needs tool_use_id.", "messages")
        answer = _text(_blocks(block.content or ""))
        yield Message("tool", answer, tool_call_id=block.tool_use_id, name=names.get(block.tool_use_id))
    if said or not blocks:
        yield Message(role, _text(said))


def _blocks(content: Content) -> list[Block]:
    match content:
        case str():
            return [Block(type="text", text=content)]
        case blocks:
            return blocks


def _text(blocks: Iterable[Block]) -> str:
    texts = []
    for block in blocks:
        # every tool is in the prompt: its name refers to it
        text = block.tool_name if block.type == "tool_reference" else block.text
        if block.type not in ("text", "tool_reference") or text is None:
            raise InvalidRequest(
                "Only blocks of types text, thinking, tool_use, tool_result and tool_reference are supported: this "
                "model reads text.",
                "messages",
            )
        texts.append(text)
    return "\n".join(texts)
