"""Messages to the service's records, and back."""

from __future__ import annotations

from gateway.carrel_options import BUDGET_RULE, read_budget
from gateway.errors import InvalidRequest
from gateway.records import (
    Budget,
    CarrelOptions,
    ChatRequest,
    ChoiceFinished,
    Completed,
    Event,
    FinishReason,
    GenerationOptions,
    Message,
    Prefilling,
    TextDelta,
    Usage,
    WorkerUsage,
)
from gateway.v1 import chat_pb2 as pb

CARREL_FIELDS = tuple(field.name for field in pb.CarrelUsage.DESCRIPTOR.fields)


def read_chat(message: pb.ChatRequest, caller: bytes) -> ChatRequest:
    """Raises InvalidRequest."""
    return ChatRequest(
        tuple(Message(each.role, each.content) for each in message.messages),
        GenerationOptions(
            model=message.model or None,
            max_tokens=message.max_tokens or None,
            temperature=message.temperature if message.HasField("temperature") else None,
            top_p=message.top_p if message.HasField("top_p") else None,
            top_k=message.top_k if message.HasField("top_k") else None,
            min_p=message.min_p if message.HasField("min_p") else None,
            seed=message.seed if message.HasField("seed") else None,
            stop=tuple(message.stop),
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
            carrel=CarrelOptions(message.carrel.policy or None, _read_budget(message.carrel)),
            session_id=message.session_id or None,
        ),
        request_id=message.request_id or None,
        caller=caller,
    )


def _read_budget(options: pb.CarrelOptions) -> Budget | None:
    match options.WhichOneof("budget"):
        case None:
            return None
        case "budget_share" if 0 < options.budget_share <= 1:
            return read_budget(options.budget_share)
        case "budget_tokens" if options.budget_tokens >= 2:
            return read_budget(options.budget_tokens)
        case name:
            raise InvalidRequest(f"{name}: {BUDGET_RULE}.", "carrel.budget")


class ChatEvents:
    """One request's events as messages: deltas, then one Complete."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._finish_reason = FinishReason.STOP

    def message(self, event: Event) -> pb.ChatEvent | None:
        """None for an event that has no message of its own."""
        match event:
            case TextDelta(text=text) if text:
                return pb.ChatEvent(request_id=self._request_id, delta=pb.Delta(content=text))
            case ChoiceFinished(finish_reason=reason):
                self._finish_reason = reason
                return None
            case Completed(usage=usage):
                complete = pb.Complete(finish_reason=self._finish_reason.value, usage=_usage(usage))
                return pb.ChatEvent(request_id=self._request_id, complete=complete)
            case TextDelta() | Prefilling():
                return None

    def error(self, error: pb.Error) -> pb.ChatEvent:
        return pb.ChatEvent(request_id=self._request_id, error=error)


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        carrel=None if usage.carrel is None else _carrel_usage(usage.carrel),
    )


def _carrel_usage(usage: WorkerUsage) -> pb.CarrelUsage:
    return pb.CarrelUsage(**{name: getattr(usage, name) for name in CARREL_FIELDS})
