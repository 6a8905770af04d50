"""An answer as Anthropic writes it: one message, or the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from gateway.errors import ServiceError
from gateway.exchange import (
    ChoiceFinished,
    Completed,
    Event,
    Generation,
    Prefilling,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from gateway.rest.answer import Answer, ReplyWriter, usage_answer
from gateway.rest.errors import message_error
from gateway.rest.messages import schemas
from gateway.rest.messages.schemas import AnswerBlock, MessageAnswer, MessageReason, MessageUsage, Piece
from gateway.rest.reply import named_frame
from gateway.rest.schemas import Tagged
from gateway.tool_calls.written import read_arguments

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter(ReplyWriter):
    """A message, or its blocks one after the other."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._is_begun = False
        # what the block that is open holds: thinking, text, or a call by its place; None: none is
        self._open: str | int | None = None
        self._num_blocks = 0
        self._reason = _reason(None, None)

    def whole(self, answer: Answer) -> MessageAnswer:
        choice = answer.choices[0]
        content: list[AnswerBlock] = []
        if choice.reasoning:
            content.append(schemas.ThinkingBlock(thinking="".join(choice.reasoning), signature=""))
        if choice.text:
            content.append(schemas.TextBlock(text=choice.text))
        content += [
            schemas.ToolUseBlock(id=call.id, name=call.name, input=read_arguments(call.arguments))
            for call in choice.calls
        ]
        usage = _prompt_usage(0, 0) if answer.usage is None else _usage(answer.usage)
        return self._message(usage, content, _reason(choice.finish_reason, choice.stop))

    async def frames(self, event: Event) -> bytes:
        return b"".join(map(named_frame, self._events(event)))

    def failed(self, error: ServiceError | None) -> bytes:
        return named_frame(message_error(error))

    def _events(self, event: Event) -> Iterator[Tagged]:
        match event:
            case Prefilling(prompt_tokens=prompt, cached_tokens=cached):
                yield from self._begin(_prompt_usage(prompt, cached))
            case ReasoningDelta(text=text) if text:
                yield from self._begin_block("thinking", schemas.ThinkingBlock(thinking="", signature=""))
                yield self._delta(schemas.ThinkingPiece(thinking=text))
            case TextDelta(text=text) if text:
                yield from self._begin_block("text", schemas.TextBlock(text=""))
                yield self._delta(schemas.TextPiece(text=text))
            case ToolCallDelta(place=place, arguments=arguments):
                yield from self._begin_block(
                    place, schemas.ToolUseBlock(id=event.id, name=event.name, input={})
                )
                if arguments:
                    yield self._delta(schemas.InputPiece(partial_json=arguments))
            case ChoiceFinished(finish_reason=reason, stop=stop):
                self._reason = _reason(reason, stop)
                yield from self._begin(_prompt_usage(0, 0))
                yield from self._end_block()
            case Completed(usage=usage):
                yield schemas.MessageDelta(delta=self._reason, usage=_usage(usage))
                yield schemas.MessageStop()
            case TextDelta() | ReasoningDelta():
                return

    def _begin(self, usage: MessageUsage) -> Iterator[Tagged]:
        if not self._is_begun:
            self._is_begun = True
            yield schemas.MessageStart(message=self._message(usage, [], _reason(None, None)))

    def _begin_block(self, what: str | int, block: AnswerBlock) -> Iterator[Tagged]:
        """Nothing where it is open already."""
        if self._open != what:
            yield from self._begin(_prompt_usage(0, 0))
            yield from self._end_block()
            self._open = what
            yield schemas.BlockStart(index=self._num_blocks, content_block=block)

    def _delta(self, piece: Piece) -> Tagged:
        return schemas.BlockDelta(index=self._num_blocks, delta=piece)

    def _end_block(self) -> Iterator[Tagged]:
        if self._open is not None:
            yield schemas.BlockStop(index=self._num_blocks)
            self._open, self._num_blocks = None, self._num_blocks + 1

    def _message(
        self, usage: MessageUsage, content: list[AnswerBlock], reason: MessageReason
    ) -> MessageAnswer:
        return MessageAnswer(
            id=f"msg_{self._generation.request_id}",
            role="assistant",
            model=self._generation.model,
            content=content,
            usage=usage,
            **dict(reason),
        )


def _reason(finish_reason: str | None, stop: str | None) -> MessageReason:
    ended = "stop_sequence" if stop is not None else REASONS.get(finish_reason or "")
    return MessageReason(stop_reason=cast(Any, ended), stop_sequence=stop)


def _prompt_usage(prompt_tokens: int, cached_tokens: int, output_tokens: int = 0) -> MessageUsage:
    return MessageUsage(
        input_tokens=prompt_tokens - cached_tokens,
        output_tokens=output_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached_tokens,
    )


def _usage(usage: Usage) -> MessageUsage:
    told = _prompt_usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    if (ours := usage_answer(usage).carrel) is not None:
        told.carrel = ours
    return told
