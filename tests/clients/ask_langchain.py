"""LangChain's ChatOpenAI against a server: an answer, the same as a stream, its usage, and a call of a tool. URL."""

from __future__ import annotations

import json
import sys
from typing import Literal

from langchain_openai import ChatOpenAI


def weather(city: Literal["Rome", "Paris"]) -> str:
    """The weather of a city."""
    return city


def main() -> None:
    model = ChatOpenAI(model="carrel-nano", base_url=f"{sys.argv[1]}/v1", api_key="none", temperature=0)
    asked = [("system", "Answer."), ("user", json.load(sys.stdin))]
    whole = model.invoke(asked, max_tokens=24)
    pieces = [chunk.content for chunk in model.stream(asked, max_tokens=24)]
    usage = whole.usage_metadata
    called = model.bind_tools([weather], tool_choice="any", strict=True).invoke(asked, max_tokens=100)
    calls = [(call["name"], call["args"]) for call in called.tool_calls]
    print(
        json.dumps(
            {"calls": calls, "whole": whole.content, "pieces": pieces, "tokens": usage["output_tokens"]}
        )
    )


if __name__ == "__main__":
    main()
