"""Ask a question about a text file, under one or several selection policies, and compare how much each attends to.

`python examples/ask_a_document.py book.txt "What is the secret number?" --policy full bitkeys pqcache`

Needs a running server (`make serve`) and the official `openai` client. The answer must stand in the file.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.table import Table

# left free for the chat template and the answer
RESERVED_TOKENS = 64
PIECE_CHARACTERS = 4000


@dataclass(frozen=True)
class Result:
    """One policy's answer and its cost; `carrel` is the server's `usage.carrel`."""

    policy: str
    answer: str
    carrel: dict[str, Any]
    ttft_ms: float


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="any UTF-8 text")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--policy", nargs="+", default=["bitkeys"], help="one or several (default: bitkeys)")
    parser.add_argument(
        "--budget", type=float, default=0.1, help="share of the prompt, or tokens (default: 0.1)"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    return parser.parse_args()


def cut_to_fit(
    text: str, question: str, max_tokens: int, max_model_len: int, url: str, console: Console
) -> str:
    """The longest beginning of `text`, in whole pieces, that the model can take with the question and the answer.

    Prints a line if it cuts the text. Counts tokens with the server's `/tokenize`, which limits the length of requests.
    """
    free = max_model_len - max_tokens - RESERVED_TOKENS - count_tokens(question, url)
    used = 0
    for start in range(0, len(text), PIECE_CHARACTERS):
        num_tokens = count_tokens(text[start : start + PIECE_CHARACTERS], url)
        if used + num_tokens > free:
            console.print(
                f"[yellow]The file is longer than the model's {max_model_len:,} tokens: only its first {used:,} tokens "
                f"({start / len(text):.0%} of the file) are read.[/yellow]"
            )
            return text[:start]
        used += num_tokens
    return text


def count_tokens(text: str, url: str) -> int:
    """Tokens of one piece of text."""
    reply = httpx.post(f"{url}/tokenize", json={"prompt": text}, headers=headers(), timeout=120)
    reply.raise_for_status()
    return int(reply.json()["count"])


def headers() -> dict[str, str]:
    key = os.environ.get("CARREL_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def ask(
    client: openai.OpenAI,
    model: str,
    prompt: str,
    policy: str,
    arguments: argparse.Namespace,
    console: Console,
) -> Result:
    """Stream one answer to the terminal. `console` shows how much of the prompt is computed until the answer begins."""
    budget = int(arguments.budget) if arguments.budget > 1 else arguments.budget
    started = time.monotonic()
    first: float | None = None
    answer = ""
    carrel: dict[str, Any] = {}
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=arguments.max_tokens,
        temperature=0,
        stream=True,
        extra_body={
            "carrel": {"policy": policy, "budget": budget},
            "stream_options": {"include_usage": True, "include_progress": True},
        },
    )
    with console.status(f"{policy}: waiting") as status:
        for chunk in stream:
            if progress := (chunk.model_extra or {}).get("carrel", {}).get("progress"):
                status.update(f"{policy}: {progress_text(progress)}")
            if chunk.choices and (text := chunk.choices[0].delta.content):
                if first is None:
                    first = time.monotonic()
                    status.stop()
                    print(f"{policy}: ", end="")
                answer += text
                print(text, end="", flush=True)
            if chunk.usage is not None:
                carrel = (chunk.usage.model_extra or {}).get("carrel", {})
    print()
    return Result(policy, answer, carrel, ((first or time.monotonic()) - started) * 1000)


def progress_text(progress: dict[str, int]) -> str:
    """Such as "25,000 of 100,000 prompt tokens done, 8,192 of them reused"."""
    done = progress["computed_tokens"] + progress["cached_tokens"]
    reused = f", {progress['cached_tokens']:,} of them reused" if progress["cached_tokens"] else ""
    return f"{done:,} of {progress['prompt_tokens']:,} prompt tokens done{reused}"


def table(results: list[Result]) -> Table:
    """One column for each policy."""
    shown = Table(title="what each answer had to read")
    shown.add_column("")
    for result in results:
        shown.add_column(result.policy, justify="right")
    rows = {
        "context, tokens": [f"{r.carrel.get('context_tokens', 0):,}" for r in results],
        "attended per step and KV head": [f"{r.carrel.get('attended_tokens', 0):,.0f}" for r in results],
        "share of the context": [
            f"{r.carrel.get('attended_tokens', 0) / max(1, r.carrel.get('context_tokens', 0)):.1%}"
            for r in results
        ],
        "offloaded, tokens": [f"{r.carrel.get('offloaded_tokens', 0):,}" for r in results],
        "moved to the device, MB": [f"{r.carrel.get('bytes_moved', 0) / 1e6:,.1f}" for r in results],
        "hit rate": [f"{r.carrel.get('hit_rate', 0):.0%}" for r in results],
        "reused from a former request, tokens": [f"{r.carrel.get('cached_tokens', 0):,}" for r in results],
        "time to first token, ms": [f"{r.ttft_ms:,.0f}" for r in results],
    }
    for name, values in rows.items():
        shown.add_row(name, *values)
    return shown


def main() -> None:
    arguments = parse_arguments()
    console, notes = Console(), Console(stderr=True)
    url = arguments.url.rstrip("/")
    try:
        text = arguments.file.read_text(encoding="utf-8")
        client = openai.OpenAI(
            base_url=f"{url}/v1", api_key=os.environ.get("CARREL_API_KEY", "none"), timeout=1800
        )
        model = client.models.list().data[0]
        max_model_len = int((model.model_extra or {})["max_model_len"])
        with notes.status("counting the tokens of the file"):
            text = cut_to_fit(text, arguments.question, arguments.max_tokens, max_model_len, url, console)
        prompt = f"{text}\n\n{arguments.question}"
        results = [ask(client, model.id, prompt, policy, arguments, notes) for policy in arguments.policy]
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"cannot read {arguments.file}: {error}")
    except (openai.APIConnectionError, httpx.ConnectError):
        sys.exit(f"no server at {url}: start one with `make serve`")
    except (openai.APIError, httpx.HTTPError) as error:
        sys.exit(f"{url}: {error}")
    console.print(table(results))


if __name__ == "__main__":
    main()
