"""OpenAI's own client, unchanged, against `/v1/responses`, and what the gateway keeps of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import openai
import pytest
from gateway_stack import Stack

from gateway.errors import TooLarge, UnknownResponse
from gateway.exchange import Message, ToolCall
from gateway.json_limits import MAX_NESTED
from gateway.rest.responses.converters import read_input
from gateway.rest.responses.schemas import InputItem
from gateway.turns import Turn, Turns


def prompt_of(stack: Stack, at: int = -1) -> str:
    return stack.tokenizer.decode(list(stack.script.requests[at].prompt_token_ids), skip_special_tokens=False)


def test_turns_go_on_from_each_other(client: openai.OpenAI, stack: Stack) -> None:
    script = stack.say("the fox 🦊 你好")
    first = client.responses.create(model="tiny", input="hello", instructions="brief", metadata={"a": "b"})
    assert (first.output_text, first.status, first.model) == ("the fox 🦊 你好", "completed", "tiny")
    assert (first.metadata, first.error, first.incomplete_details) == ({"a": "b"}, None, None)
    assert prompt_of(stack) == "<|bos|><|system|>brief<|end|><|user|>hello<|end|><|assistant|>"
    usage = first.usage
    assert usage.input_tokens == len(script.requests[0].prompt_token_ids)
    assert (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (len(script.reply), 3)
    stack.say("dog")
    second = client.responses.create(
        model="tiny",
        previous_response_id=first.id,
        max_output_tokens=1,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "who?"}]}],
        extra_body={"carrel": {"policy": "pqcache"}},
    )
    # instructions are not taken over
    said = "<|bos|><|user|>hello<|end|><|assistant|>the fox 🦊 你好<|end|><|user|>who?<|end|><|assistant|>"
    assert prompt_of(stack) == said
    assert (second.status, second.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    sessions = {request.session_id for request in (*script.requests, *stack.script.requests)}
    assert len(sessions) == 1
    assert stack.script.requests[0].policy == "pqcache"
    assert client.responses.retrieve(second.id).output_text == second.output_text
    # two conversations that went on from one
    stack.say("fox")
    client.responses.create(model="tiny", previous_response_id=first.id, input="why?", store=False)
    assert prompt_of(stack).endswith("你好<|end|><|user|>why?<|end|><|assistant|>")


def test_what_is_not_kept_is_not_found(client: openai.OpenAI, stack: Stack, locked_stack: Stack) -> None:
    script = stack.say("the fox")
    gone = client.responses.create(model="tiny", input="hello", store=False)
    assert script.requests[0].session_id == ""
    kept = client.responses.create(model="tiny", input="hello")
    client.responses.delete(kept.id)
    for missing in (gone.id, kept.id, "../etc/passwd", "resp_"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="tiny", input="hello", previous_response_id=missing)
        assert caught.value.code == "previous_response_not_found"
        assert "it was deleted" in str(caught.value)
    locked_stack.say("the fox")
    mine, other = (
        openai.OpenAI(base_url=f"{locked_stack.url}/v1", api_key=key, max_retries=0)
        for key in ("right-key", "other-key")
    )
    first = mine.responses.create(model="tiny", input="hello")
    assert mine.responses.retrieve(first.id).id == first.id
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(first.id)


def test_a_response_streams(client: openai.OpenAI, stack: Stack) -> None:
    stack.say("the quick 🦊 over 你好", progress=[(2, 2), (6, 2)])
    asked = {
        "model": "tiny",
        "input": "hello",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
        "the quick 🦊 over 你好"
    )
    whole = events[-1].response
    assert whole.output_text == "the quick 🦊 over 你好"
    assert len(whole.output[0].content[0].logprobs[0].top_logprobs) == 2
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    with client.responses.stream(model="tiny", input="hello") as stream:
        assert stream.get_final_response().output_text == whole.output_text
    cut = list(client.responses.create(model="tiny", input="hello", max_output_tokens=2, stream=True))[-1]
    assert (cut.type, cut.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
    stack.say("the fox", fail_at=1)
    last = list(client.responses.create(**asked, stream=True))[-1]
    assert (last.type, last.code) == ("error", "generation_failed")


def turn(name: str, previous: str | None = None, size: int = 0, session: str = "s") -> Turn:
    return Turn(name, previous, session, (Message("user", name), Message("assistant", "x" * size)), b"{}")


def test_turns_are_kept_as_far_as_there_is_room() -> None:
    room = turn("a", size=1000).num_bytes
    turns = Turns(max_bytes=4 * room, max_caller_bytes=2 * room)
    for name, previous in (("a", None), ("b", "a")):
        turns.add(b"one", turn(name, previous, 1000))
    assert [each.content[:1] for each in turns.messages(b"one", "b")] == ["a", "x", "b", "x"]
    turns.add(b"one", turn("c", "b", 1000))
    # a turn outlives those that go on from it: b was used longest ago, and with it c goes on from nothing
    assert turns.messages(b"one", "a")
    for name in ("b", "c"):
        with pytest.raises(UnknownResponse):
            turns.messages(b"one", name)
    assert turns.get(b"one", "c").id == "c"
    turns.add(b"one", turn("huge", size=100_000))
    with pytest.raises(UnknownResponse):
        turns.get(b"one", "huge")
    for caller in (b"two", b"three", b"four"):
        turns.add(caller, turn("a", size=1000))
        turns.add(caller, turn("b", size=1000, session="other"))
    with pytest.raises(UnknownResponse):
        turns.get(b"two", "a")
    assert turns.remove(b"four", "a")
    turns.add(b"four", turn("d", "b", session="other"))
    assert not turns.remove(b"four", "b")


@pytest.mark.parametrize(
    "make",
    [
        lambda: ((Message("user", "\N{GRINNING FACE}" * 30_000),), b"{}"),
        lambda: (tuple(Message("user", "") for _ in range(1000)), b"{}"),
        lambda: (tuple(Message("tool", "", tool_call_id=str(i) * 100) for i in range(300)), b"{}"),
        lambda: ((Message("assistant", "", tuple(ToolCall(str(i), "f", "{}") for i in range(999))),), b"{}"),
        # instructions, metadata, tools and logprobs are in it
        lambda: ((Message("user", ""),), b"x" * 100_000),
    ],
    ids=["text", "messages", "ids", "calls", "answer"],
)
def test_a_turn_counts_with_all_that_it_keeps(make: Callable[[], tuple[tuple[Message, ...], bytes]]) -> None:
    kept = Turn("a", None, "s", *make())
    assert kept.num_bytes >= taken(kept)


def taken(value: Any) -> int:
    """By an object and all that it holds."""
    parts = [getattr(value, each.name) for each in fields(value)] if is_dataclass(value) else []
    parts += value if type(value) is tuple else ()
    return sys.getsizeof(value) + sum(map(taken, parts))


class CountedText(str):
    """Counts how often it is compared."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedText.num_compared += 1
        return super().__eq__(other)


def test_an_answer_to_a_call_is_not_looked_for_among_all_calls() -> None:
    count = 300
    ids = [CountedText(f"call {at}") for at in range(count)]
    calls = [InputItem.model_construct(type="function_call", call_id=each, name=f"f{each}") for each in ids]
    answers = [
        InputItem.model_construct(type="function_call_output", call_id=each, output="x") for each in ids
    ]
    asked, *answered = read_input([*calls, *answers])
    assert len(asked.tool_calls) == count
    assert [each.name for each in answered] == [f"f{each}" for each in ids]
    assert CountedText.num_compared < 10 * count


def test_a_conversation_has_no_more_messages_than_a_body_may() -> None:
    turns, name = Turns(), ""
    said = (Message("user", "x"),) * (MAX_NESTED // 2)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        turns.add(b"one", Turn(name, previous, "s", said, b"{}"))
    assert len(turns.messages(b"one", "b")) == MAX_NESTED
    with pytest.raises(TooLarge, match="messages behind previous_response_id"):
        turns.messages(b"one", "c")
