"""nginx before a real server, with the file that the page of clients has: `make test-clients`, where nginx is there."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chromium
import grpc
import httpx
import pytest
from certificates import sign_oneself
from ports import free_port
from serving import ROOT, Serving, is_healthy, serving
from waiting import PATIENCE, wait_until

from gateway.v1 import chat_pb2, chat_pb2_grpc

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
KEY = "sk-behind-nginx"
PREFIX = "/llm"
MIB = 2**20
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "The secret number of the fox is 48213.\n\nWhich is it?"}],
    "max_tokens": 100,
    "ignore_eos": True,
}
# what the page's file says of a machine that is not this one
FILE_END = """
daemon off;
user {user};
pid {folder}/pid;
error_log {folder}/error.log;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {page}
}}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]


@dataclass(frozen=True)
class Proxy:
    """A running nginx."""

    port: int
    certificate: Path

    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"https://127.0.0.1:{self.port}",
            headers={"Authorization": f"Bearer {KEY}"},
            verify=ssl.create_default_context(cafile=str(self.certificate)),
            timeout=PATIENCE,
            trust_env=False,
        )


def page_file(server: Serving, port: int, key: Path, certificate: Path) -> str:
    """The page's, with this machine's addresses and certificate, and the API under a path too."""
    page = (ROOT / "docs" / "clients.md").read_text()
    [text] = re.findall(r"```nginx\n(.*?)```", page, re.DOTALL)
    for told, here in {
        "listen 443": f"listen 127.0.0.1:{port}",
        "/etc/letsencrypt/live/api.example.com/fullchain.pem": str(certificate),
        "/etc/letsencrypt/live/api.example.com/privkey.pem": str(key),
        "127.0.0.1:8000": server.url.removeprefix("http://"),
        "127.0.0.1:8001": server.grpc_target,
    }.items():
        assert told in text
        text = text.replace(told, here)
    [whole] = re.findall(r"location / \{.*?\}", text, re.DOTALL)
    return text.replace(whole, whole + whole.replace("location /", f"location {PREFIX}/"))


@contextmanager
def running(folder: Path, server: Serving, read_timeout: str = "1800s") -> Iterator[Proxy]:
    assert NGINX is not None
    port = free_port()
    key, certificate = sign_oneself(folder)
    text = page_file(server, port, key, certificate)
    assert "proxy_read_timeout 1800s" in text
    text = text.replace("proxy_read_timeout 1800s", f"proxy_read_timeout {read_timeout}")
    file = folder / "nginx.conf"
    file.write_text(FILE_END.format(user=getpass.getuser(), folder=folder, page=text))
    command = [NGINX, "-e", str(folder / "error.log"), "-c", str(file)]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=PATIENCE)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(command)
    try:
        proxy = Proxy(port, certificate)
        with proxy.client() as client:
            wait_until(lambda: is_healthy(client), lambda: (folder / "error.log").read_text())
        yield proxy
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """Each prompt takes 8 s more and each step 0.1, so that there is something to wait for."""
    options = ["--no-warmup", "--heartbeat", "0.5", "--api-key", KEY, "--root-path", PREFIX]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "slow_worker"))
        with serving(*options, "--max-body-bytes", "16MiB") as running:
            yield running


@pytest.fixture(scope="module")
def proxy(server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with running(tmp_path_factory.mktemp("nginx"), server) as it:
        yield it


def all_is_free(server: Serving) -> bool:
    stats = server.worker_stats()
    return stats.running == stats.waiting == stats.slot_used_tokens == 0


def test_tokens_come_one_by_one_and_a_client_that_leaves_frees_its_seat(
    server: Serving, proxy: Proxy
) -> None:
    before = server.worker_stats().requests_aborted_total
    with proxy.client() as client, client.stream("POST", CHAT, json=ASKED | {"stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if '"content":' in line and '"content":""' not in line)
        # the first is here, and the last is not computed
        assert server.worker_stats().running == 1
    wait_until(lambda: all_is_free(server))
    assert server.worker_stats().requests_aborted_total == before + 1


def test_a_prompt_may_take_longer_than_nginx_waits_for_the_next_byte(server: Serving, tmp_path: Path) -> None:
    asked = ASKED | {"max_tokens": 4}
    with running(tmp_path, server, read_timeout="3s") as impatient, impatient.client() as client:
        silent = client.post(CHAT, json=asked)
        assert (silent.status_code, "nginx" in silent.text) == (504, True)
        wait_until(lambda: all_is_free(server))
        with client.stream("POST", CHAT, json=asked | {"stream": True}) as answer:
            lines = list(answer.iter_lines())
        assert lines.count(": ping") > 3
        assert "data: [DONE]" in lines
        assert any('"finish_reason":"length"' in line for line in lines)


def test_a_large_body_is_refused_by_who_knows_the_context(proxy: Proxy) -> None:
    with proxy.client() as client:
        taken = client.post("/v1/completions", json={"prompt": "fox " * (3 * MIB)})
        assert taken.status_code == 400
        assert taken.json()["error"]["code"] == "context_length_exceeded"
        assert client.post("/v1/completions", json={"prompt": "fox " * (5 * MIB)}).status_code == 413


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_the_page_finds_its_server_and_what_a_request_attends(
    server: Serving, proxy: Proxy, prefix: str
) -> None:
    asked = ASKED | {"stream": True, "carrel": {"policy": "bitkeys", "attention": True}}
    name = f"of-a-page{prefix.replace('/', '-')}"
    with proxy.client() as client:
        page = client.get(f"{prefix}/")
        assert (page.status_code, "script-src" in page.headers["Content-Security-Policy"]) == (200, True)
        assert client.get(f"{prefix}/v1/models").json()["data"][0]["id"] == "carrel-nano"
        # as the page does, which asks for the picture under the id that it chose
        with client.stream("POST", f"{prefix}{CHAT}", json=asked, headers={"X-Request-Id": name}) as answer:
            assert answer.headers["X-Request-Id"] == name
            lines = answer.iter_lines()
            assert next(line for line in lines if line.startswith("data:"))
            with client.stream("GET", f"{prefix}/v1/attention/{name}") as pictures:
                assert pictures.status_code == 200
                assert next(line for line in pictures.iter_lines() if '"attended"' in line)
    wait_until(lambda: all_is_free(server))


@pytest.mark.skipif(chromium.find() is None, reason="needs a browser")
@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_in_a_browser_the_page_draws_while_the_answer_comes_and_stops_it(
    server: Serving, proxy: Proxy, tmp_path: Path, prefix: str
) -> None:
    before = server.worker_stats().requests_aborted_total
    with chromium.browsing(tmp_path / "profile") as tab:
        tab.send("Security.setIgnoreCertificateErrors", ignore=True)
        tab.open(f"https://127.0.0.1:{proxy.port}{prefix}/")
        tab.wait("document.querySelector('#key:not(.hidden)')")
        tab.run("document.querySelector('#key-value').focus()")
        tab.type(KEY)
        tab.press("Enter", 13)
        tab.wait("document.querySelector('.pane')")
        tab.complaints.clear()  # the browser's own line for a 401
        tab.run(f"take('foxes.txt', {json.dumps('The secret number of the fox is 48213. ' * 40)})")
        tab.run("document.querySelector('#question').focus()")
        tab.type("Write down all of it again.")
        tab.press("Enter", 13)
        tab.wait("panes[0].strip.picture?.step > 3 && panes[0].answer && document.querySelector('.going')")
        assert server.worker_stats().running == 1
        tab.press("Escape", 27)
        tab.wait("document.querySelector('[data-ended=stopped]')")
        wait_until(lambda: all_is_free(server))
        assert server.worker_stats().requests_aborted_total == before + 1
        assert tab.complaints == []


def test_chat_grpc_streams_and_is_cancelled(server: Serving, proxy: Proxy) -> None:
    before = server.worker_stats().requests_aborted_total
    credentials = grpc.ssl_channel_credentials(proxy.certificate.read_bytes())
    [message] = ASKED["messages"]
    asked = chat_pb2.ChatRequest(messages=[chat_pb2.Message(**message)], max_tokens=100, ignore_eos=True)
    with grpc.secure_channel(f"127.0.0.1:{proxy.port}", credentials) as channel:
        named = (("authorization", f"Bearer {KEY}"),)
        call = chat_pb2_grpc.ChatStub(channel).Complete(asked, metadata=named, timeout=PATIENCE)
        assert next(event for event in call if event.HasField("delta") and event.delta.content)
        assert server.worker_stats().running == 1
        call.cancel()
        wait_until(lambda: all_is_free(server))
        assert server.worker_stats().requests_aborted_total == before + 1
        with pytest.raises(grpc.RpcError) as refused:
            chat_pb2_grpc.ChatStub(channel).ListModels(chat_pb2.ListModelsRequest(), timeout=PATIENCE)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
