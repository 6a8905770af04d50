"""Write the README's request: a document of about 8K tokens with one fact in it, and the question.

`python -m tools.make_request [--policy bitkeys] [--budget 0.1] [--out examples/documents/request.json]`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "examples" / "documents" / "voyage-of-the-beagle.txt"
FACT = "The secret number of the amber fox is 48213."
QUESTION = "What is the secret number of the amber fox?"
# About 8,000 tokens of carrel-nano's tokenizer.
NUM_CHARACTERS = 32_000
FACT_PLACE = 0.4


def document(num_characters: int = NUM_CHARACTERS, place: float = FACT_PLACE) -> str:
    """The text's first paragraphs, with the fact as a sentence of its own at a share `place` of them."""
    paragraphs = DOCUMENT.read_text(encoding="utf-8")[:num_characters].split("\n\n")[:-1]
    paragraphs.insert(int(len(paragraphs) * place), FACT)
    return "\n\n".join(paragraphs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="bitkeys")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--out", type=Path, default=DOCUMENT.with_name("request.json"))
    arguments = parser.parse_args()
    content = f"{document()}\n\n{QUESTION}"
    body = {
        "model": "carrel-nano",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "carrel": {"policy": arguments.policy, "budget": arguments.budget},
        "messages": [{"role": "user", "content": content}],
    }
    arguments.out.write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{arguments.out}: {len(content)} characters")


if __name__ == "__main__":
    main()
