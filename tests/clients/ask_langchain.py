"""LangChain's ChatOpenAI against a server: an answer, the same as a stream, and its usage. URL."""

from __future__ import annotations

import json
import sys

from langchain_openai import ChatOpenAI


def main() -> None:
    model = ChatOpenAI(model="carrel-nano", base_url=f"{sys.argv[1]}/v1", api_key="none", temperature=0)
    asked = [("system", "Answer."), ("user", json.load(sys.stdin))]
    whole = model.invoke(asked, max_tokens=24)
    pieces = [chunk.content for chunk in model.stream(asked, max_tokens=24)]
    usage = whole.usage_metadata
    print(json.dumps({"whole": whole.content, "pieces": pieces, "tokens": usage["output_tokens"]}))


if __name__ == "__main__":
    main()
