"""Two hundred random schemas, at temperature 1: every answer is JSON of its schema, whatever the model knows."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from random_schemas import random_schema
from serving import NANO, ROOT, Serving, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_SCHEMAS, AT_ONCE = 200, 8
MODELS = {"carrel-nano": NANO, "smollm2": ROOT / "models" / "smollm2.gguf"}
# those that the checker knows as JSON schemas have them: of a time it refuses the offset
CHECKED = jsonschema.FormatChecker(("date", "uuid", "ipv4"))


def ask(server: Serving, seed: int) -> tuple[str, str, int]:
    """Why the answer ended, it, and its tokens; an odd seed's is the arguments of a call."""
    client = server.openai()
    schema = random_schema(seed)
    arguments = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": f"Give an example of {json.dumps(schema)}."}],
        "temperature": 1,
        "seed": seed,
        "max_tokens": 1500,
    }
    if seed % 2 and schema["type"] == "object":
        tool = {"type": "function", "function": {"name": "give", "parameters": schema}}
        reply = client.chat.completions.create(
            **arguments, tools=[tool], tool_choice="required", parallel_tool_calls=False
        )
        (call,) = reply.choices[0].message.tool_calls
        return reply.choices[0].finish_reason, call.function.arguments, reply.usage.completion_tokens
    named = {"name": "example", "schema": schema}
    reply = client.chat.completions.create(
        **arguments, response_format={"type": "json_schema", "json_schema": named}
    )
    return reply.choices[0].finish_reason, reply.choices[0].message.content, reply.usage.completion_tokens


def is_of(schema: dict[str, Any], text: str) -> bool:
    return jsonschema.Draft202012Validator(schema, format_checker=CHECKED).is_valid(json.loads(text))


@pytest.mark.parametrize("model", MODELS)
def test_every_answer_is_of_its_schema(model: str) -> None:
    if not MODELS[model].exists():
        pytest.skip(f"{MODELS[model]} is fetched by make serve MODEL=smollm2")
    with serving(model=MODELS[model]) as server, ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda seed: ask(server, seed), range(NUM_SCHEMAS)))
    wrong = [
        (seed, reason, text)
        for seed, (reason, text, _) in enumerate(answers)
        if reason not in ("stop", "tool_calls") or not is_of(random_schema(seed), text)
    ]
    # for who runs it with -s
    print(
        f"{model}: {len(answers)} answers, {len(wrong)} wrong, {sum(count for _, _, count in answers)} tokens"
    )
    assert not wrong
