"""Other APIs than OpenAI's chat, by their own packages, of a real model."""

from __future__ import annotations

import anthropic
import pytest
from serving import Serving

MODEL = "carrel-nano"
QUESTION = "The secret number of the amber fox is 48213.\n\nWhat is the secret number of the amber fox?"


def check_doors(server: Serving) -> None:
    """A chat, a message and a response say the same; an echo finds an answer as likely as it was when it was made."""
    client = server.openai()
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=600)
    asked = [{"role": "user", "content": QUESTION}]
    whole = {"carrel": {"policy": "full"}}
    told_ids = {"return_token_ids": True, **whole}
    chat = client.chat.completions.create(
        model=MODEL, messages=asked, temperature=0, max_tokens=8, logprobs=True, extra_body=told_ids
    ).choices[0]
    greedy = {"temperature": 0, **whole}
    message = claude.messages.create(model=MODEL, messages=asked, max_tokens=8, extra_body=greedy)
    response = client.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=8, temperature=0, extra_body=whole
    )
    assert message.content[0].text == response.output_text == chat.message.content
    prompt, answer = chat.model_extra["prompt_token_ids"], chat.model_extra["token_ids"]
    echo = client.completions.create(
        model=MODEL, prompt=prompt + answer, echo=True, max_tokens=0, logprobs=0, extra_body=whole
    )
    told = echo.choices[0].logprobs.token_logprobs
    assert len(told) == len(prompt + answer)
    made = [token.logprob for token in chat.logprobs.content]
    assert told[len(prompt) :] == pytest.approx(made, abs=2e-2)
