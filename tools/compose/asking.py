"""Questions to a deployment: the one of examples/documents over REST and gRPC, and streams that run meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import grpc
import httpx

from carrel.sse import chunks
from gateway.v1 import chat_pb2, chat_pb2_grpc
from tools.compose.deployment import ROOT, CheckFailed, Deployment, wait_until

REQUEST = ROOT / "examples" / "documents" / "request.json"
# what tools/make_request.py put into the document
ANSWER = "48213"
POLICY = "bitkeys"
LEAST_OFFLOADED_TOKENS = 8000
ANSWER_S = 600.0


def question(**changes: object) -> dict[str, Any]:
    """The body of examples/documents, with some fields changed."""
    return json.loads(REQUEST.read_text()) | changes


def ask_by_rest(deployment: Deployment, policy: str = POLICY) -> int:
    """How many tokens of the prompt were known."""
    body = question(stream=False)
    body["carrel"] |= {"policy": policy}
    del body["stream_options"]
    reply = httpx.post(
        f"http://127.0.0.1:{deployment.port}/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {deployment.key}"},
        timeout=ANSWER_S,
        trust_env=False,
    )
    if reply.status_code != httpx.codes.OK:
        raise CheckFailed(f"REST: {reply.status_code} {reply.text}")
    found = reply.json()
    used = found["usage"]["carrel"]
    check_answer(
        "REST",
        found["choices"][0]["message"]["content"],
        used["policy"],
        used["offloaded_tokens"],
        used["bytes_moved"],
        policy,
    )
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_by_grpc(deployment: Deployment) -> None:
    body = question()
    request = chat_pb2.ChatRequest(
        messages=[chat_pb2.Message(**message) for message in body["messages"]],
        temperature=body["temperature"],
        carrel=chat_pb2.CarrelOptions(policy=body["carrel"]["policy"], budget_share=body["carrel"]["budget"]),
    )
    answer, used = "", None
    with grpc.insecure_channel(f"127.0.0.1:{deployment.grpc_port}") as channel:
        metadata = (("authorization", f"Bearer {deployment.key}"),)
        try:
            for event in chat_pb2_grpc.ChatStub(channel).Complete(
                request, metadata=metadata, timeout=ANSWER_S
            ):
                if event.HasField("delta"):
                    answer += event.delta.content
                elif event.HasField("complete"):
                    used = event.complete.usage.carrel
                else:
                    raise CheckFailed(f"gRPC: {event}")
        except grpc.RpcError as exc:
            raise CheckFailed(f"gRPC: {exc}") from exc
    if used is None:
        raise CheckFailed("gRPC: the stream ended without an account")
    check_answer("gRPC", answer, used.policy, used.offloaded_tokens, used.bytes_moved)


def ask(deployment: Deployment) -> int:
    """Ask over both, and tell how many tokens of the prompt the first found. Raises CheckFailed unless both answers are
    right."""
    num_known = ask_by_rest(deployment)
    ask_by_grpc(deployment)
    return num_known


def check_answer(
    how: str, answer: str, policy: str, offloaded_tokens: int, bytes_moved: int, wanted: str = POLICY
) -> None:
    """Raises CheckFailed unless the answer is right and came out of the arena."""
    shown = f"{how}: {answer!r} under {policy}, {offloaded_tokens} tokens offloaded, {bytes_moved} bytes back"
    if answer.strip() != ANSWER:
        raise CheckFailed(f"{shown}: {ANSWER} is right")
    if policy != wanted or offloaded_tokens < LEAST_OFFLOADED_TOKENS or bytes_moved == 0:
        raise CheckFailed(f"{shown}: rows were to go through the arena")
    print(f"compose-test: {shown}", flush=True)


class RunningStream:
    """A streamed answer, read by a thread of its own until it ends, however it ends."""

    def __init__(self, deployment: Deployment, body: Mapping[str, Any]) -> None:
        self.num_deltas = 0
        self.text = ""
        self.finish_reason = ""
        # the error frame's type, or how the connection broke
        self.error = ""
        self._deployment = deployment
        self._body = {**body, "stream": True}
        # nothing waits for it when the test has failed
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for_deltas(self, count: int) -> None:
        """Raises CheckFailed when the stream ends before, or nothing comes."""
        wait_until(
            f"a stream has {count} deltas",
            lambda: self.num_deltas >= count or not self._thread.is_alive(),
            ANSWER_S,
        )
        if not self._thread.is_alive():
            raise CheckFailed(
                f"a stream ended after {self.num_deltas} deltas: {self.error or self.finish_reason}"
            )

    def wait_for_end(self, seconds: float) -> None:
        """Raises CheckFailed when the stream hangs."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise CheckFailed(f"a stream has not ended within {seconds:g} s")

    def _read(self) -> None:
        try:
            with httpx.stream(
                "POST",
                f"http://127.0.0.1:{self._deployment.port}/v1/chat/completions",
                json=self._body,
                headers={"Authorization": f"Bearer {self._deployment.key}"},
                timeout=ANSWER_S,
                trust_env=False,
            ) as reply:
                if reply.status_code != httpx.codes.OK:
                    self.error = f"{reply.status_code} {reply.read().decode()}"
                    return
                for chunk in chunks(reply):
                    self._take(chunk)
        except httpx.HTTPError as exc:
            self.error = type(exc).__name__

    def _take(self, frame: Mapping[str, Any]) -> None:
        if "error" in frame:
            self.error = frame["error"].get("code") or frame["error"]["type"]
        for choice in frame.get("choices", ()):
            self.text += choice["delta"].get("content") or ""
            self.num_deltas += 1
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
