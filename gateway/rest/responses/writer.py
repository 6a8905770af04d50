"""An answer as OpenAI's responses have it: one object, or the events of a stream."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from starlette.responses import Response

from gateway.errors import ServiceError
from gateway.exchange import (
    ChoiceFinished,
    Completed,
    Event,
    Prefilling,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from gateway.rest.answer import Answer, ChoiceText, usage_json
from gateway.rest.errors import error_body, internal_error_body
from gateway.rest.formats import chat_logprobs
from gateway.rest.sse import named_frame

# of a stream's events: where in the output the text is
PLACE = {"output_index": 0, "content_index": 0}


class ResponseWriter:
    """A `ReplyWriter` of one request."""

    end = b""

    def __init__(self, head: dict[str, Any], done: Callable[[dict[str, Any], str], None]) -> None:
        """head: what of the object is known before. done: is given the whole object, and its text, before the client
        is."""
        self._head = head
        self._done = done
        self._item_id = head["id"].replace("resp_", "msg_")
        self._choice = ChoiceText(0)
        self._numbers = count()
        self._is_begun = False
        self._has_item = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        self._choice = answer.choices[0]
        return self._finish(answer.usage)

    def unfinished(self, answer: Answer, error: ServiceError) -> Response:
        raise error

    def frames(self, event: Event) -> bytes:
        return b"".join(map(self._frame, self._events(event)))

    def failed(self, error: ServiceError | None) -> bytes:
        told = (internal_error_body() if error is None else error_body(error))["error"]
        code, message, param = str(told["code"]), told["message"], told["param"]
        return self._frame({"type": "error", "code": code, "message": message, "param": param})

    def _frame(self, event: dict[str, Any]) -> bytes:
        return named_frame({**event, "sequence_number": next(self._numbers)})

    def _events(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case Prefilling():
                return self._begin()
            case TextDelta(text=text, logprobs=logprobs):
                self._choice.pieces.append(text)
                self._choice.logprobs.extend(logprobs)
                if not text and not logprobs:
                    return self._begin()
                delta = self._of_text("delta", delta=text, logprobs=_logprobs(logprobs))
                return [*self._begin(), *self._begin_item(), delta]
            case ChoiceFinished(finish_reason=reason):
                self._choice.finish_reason = reason
                return [*self._begin(), *self._begin_item(), *self._end_item()]
            case Completed(usage=usage):
                response = self._finish(usage)
                return [{"type": f"response.{response['status']}", "response": response}]
            case ReasoningDelta() | ToolCallDelta():
                # calls and reasoning come to chats that ask for them: none does here
                return []

    def _begin(self) -> list[dict[str, Any]]:
        if self._is_begun:
            return []
        self._is_begun = True
        response = self._object("in_progress", [], None)
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _begin_item(self) -> list[dict[str, Any]]:
        if self._has_item:
            return []
        self._has_item = True
        item = self._item("in_progress", [])
        return [
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            self._of_part("added", part=_part("", [])),
        ]

    def _end_item(self) -> list[dict[str, Any]]:
        text, logprobs = self._choice.text, _logprobs(self._choice.logprobs)
        part = _part(text, logprobs)
        return [
            self._of_text("done", text=text, logprobs=logprobs),
            self._of_part("done", part=part),
            {
                "type": "response.output_item.done",
                "output_index": 0,
                "item": self._item(self._status, [part]),
            },
        ]

    def _of_text(self, what: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.output_text.{what}", "item_id": self._item_id, **PLACE, **fields}

    def _of_part(self, what: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.content_part.{what}", "item_id": self._item_id, **PLACE, **fields}

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _finish(self, usage: Usage | None) -> dict[str, Any]:
        part = _part(self._choice.text, _logprobs(self._choice.logprobs))
        response = self._object(self._status, [self._item(self._status, [part])], usage)
        self._done(response, self._choice.text)
        return response

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item_id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _object(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "incomplete_details": details,
            "output": output,
            "usage": None if usage is None else _usage(usage),
        }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(tokens: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = chat_logprobs(tokens)["content"]
    return content


def _usage(usage: Usage) -> dict[str, Any]:
    ours = usage_json(usage)
    carrel = {"carrel": ours["carrel"]} if "carrel" in ours else {}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
        **carrel,
    }
