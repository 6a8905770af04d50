"""`litellm` against a server, as OpenAI's and as Anthropic's: an answer, and the same as a stream. URL."""

from __future__ import annotations

import json
import sys

import litellm


def main() -> None:
    url, question = sys.argv[1], json.load(sys.stdin)
    told = {}
    for name, base in (("openai/carrel-nano", f"{url}/v1"), ("anthropic/carrel-nano", url)):
        asked = {
            "model": name,
            "api_base": base,
            "api_key": "none",
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 24,
        }
        whole = litellm.completion(**asked)
        pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
        told[name] = {
            "whole": whole.choices[0].message.content,
            "pieces": pieces,
            "tokens": whole.usage.completion_tokens,
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
