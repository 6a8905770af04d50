"""Open WebUI, started as the page of clients has it, before a real server: `make test-clients`, where it is there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from ports import free_port
from serving import ROOT, Serving, is_healthy, serving
from waiting import PATIENCE, wait_until

USER = {"name": "a", "email": "a@localhost.test", "password": "Only-for-a-test-1"}
ASKED = {
    "model": "carrel-nano",
    "messages": [
        {
            "role": "user",
            "content": "The secret number of the fox is 48213.\n\nWhat is the secret number of the fox?",
        }
    ],
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("open-webui") is None, reason="open-webui is not installed"),
]


@contextmanager
def webui(server: Serving, folder: Path) -> Iterator[httpx.Client]:
    """A client of one that is new, whose first user is logged in."""
    page = (ROOT / "docs" / "clients.md").read_text()
    [line] = re.findall(r"^\$ (OPENAI_API_BASE_URL=.* open-webui serve .*)$", page, re.MULTILINE)
    port = free_port()
    line = line.replace("http://127.0.0.1:8000", server.url).replace("--port 3000", f"--port {port}")
    words = shlex.split(line)
    given = dict(word.split("=", 1) for word in words if word[0].isupper())
    command = [word for word in words if not word[0].isupper()]
    # it has a Python of its own, and would look for models of embeddings on the hub
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own |= {"DATA_DIR": str(folder / "data"), "HF_HUB_OFFLINE": "1", "WEBUI_SECRET_KEY": "k" * 32}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=own | given, cwd=folder, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE) as client:
            wait_until(lambda: is_healthy(client), lambda: (folder / "log").read_text()[-3000:], poll=0.5)
            token = client.post("/api/v1/auths/signup", json=USER).raise_for_status().json()["token"]
            client.headers["Authorization"] = f"Bearer {token}"
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE)


def test_it_finds_the_model_and_chats(tmp_path: Path) -> None:
    # the small model never ends some answers, and those of the last requests have no other limit
    with serving("--max-model-len", "2048") as server, webui(server, tmp_path) as client:
        print(f"Open WebUI {client.get('/api/config').json()['version']}")
        assert [model["id"] for model in client.get("/api/models").json()["data"]] == ["carrel-nano"]
        whole = client.post("/api/chat/completions", json=ASKED | {"stream": False}).json()
        assert whole["choices"][0]["message"]["content"] == "48213"
        with client.stream("POST", "/api/chat/completions", json=ASKED | {"stream": True}) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
        assert "".join(deltas) == "48213"
        assert len(deltas) > 3
        # what it asks the model for beside each chat
        for what in ("title", "tags", "follow_up"):
            client.post(f"/api/v1/tasks/{what}/completions", json=ASKED | {"chat_id": "x"}).raise_for_status()
