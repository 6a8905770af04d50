"""Names of the served model: its own, and those that match a pattern."""

from __future__ import annotations

from pathlib import Path

import httpx
from gateway_stack import running_stack
from waiting import PATIENCE


def test_other_names_are_not_listed_and_answers_have_its_own(tmp_path: Path, model_dir: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with (
        running_stack(tmp_path, model_dir, served_model_aliases=("claude-*", "gpt-*")) as stack,
        httpx.Client(base_url=f"{stack.url}/v1", timeout=PATIENCE) as client,
    ):
        assert [each["id"] for each in client.get("/models").json()["data"]] == ["tiny"]
        stack.say("the fox")
        for asked, status in (
            ("gpt-5.5", 200), ("claude-", 200), ("tiny", 200), ("gpt", 404), ("my-gpt-5", 404), ("GPT-5", 404),
            ("*", 404),
        ):  # fmt: skip
            reply = client.post("/chat/completions", json={**body, "model": asked})
            assert reply.status_code == status, asked
            assert status == 404 or reply.json()["model"] == "tiny"
            assert client.get(f"/models/{asked}").status_code == status
