"""A whole gateway on free loopback ports with a fake worker behind it, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_worker import FakeWorker, Script, start_worker
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from waiting import PATIENCE

from gateway.config import GatewayConfig
from gateway.listener import bind
from gateway.rest.server import RESTServer
from gateway.rpc.server import ChatServer
from gateway.server import create_service, load
from gateway.service import ChatService
from gateway.worker_client import GRPCWorkerClient

MAX_MODEL_LEN = 256
# the four APIs, each with a body that it answers
CHAT, COMPLETION, RESPONSE, MESSAGE = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages")
)
HELLO = [{"role": "user", "content": "hello"}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETION: {"prompt": "hello"},
    RESPONSE: {"input": "hello"},
    MESSAGE: {"messages": HELLO, "max_tokens": 4},
}
SPECIAL = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
    "{% endfor %}{{ suffix }}<|assistant|>"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A byte-level BPE so small that emoji and CJK need several tokens a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(name, special=True) for name in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 5], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|end|>"}
    chat = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | chat))
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7}')
    return folder


@dataclass
class Stack:
    """Addresses and seams of a running gateway; `script` steers its worker and may be replaced at any time."""

    config: GatewayConfig
    service: ChatService
    tokenizer: Tokenizer
    url: str
    grpc_target: str
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Event
    rest: RESTServer
    script: Script = field(default_factory=Script)

    def say(self, text: str, **values: object) -> Script:
        """The worker's next answers are this text."""
        self.script = Script(reply=self.tokenizer.encode(text, add_special_tokens=False).ids, **values)
        return self.script


@contextmanager
def running_stack(
    folder: Path, model: Path, max_model_len: int = MAX_MODEL_LEN, **values: object
) -> Iterator[Stack]:
    socket_path = f"unix:{folder}/worker.sock"
    options = {"model": str(model), "worker": socket_path, "port": 0, "grpc_port": 0, **values}
    config = GatewayConfig(
        **{"served_model_names": ("tiny",), "heartbeat_s": 1.0, "no_warmup": True, **options}
    )
    box: list[Stack] = []
    started = threading.Event()

    async def main() -> None:
        raw = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokenizer, defaults = load(config)
        fake = FakeWorker(lambda: box[0].script, raw.get_vocab_size(), max_model_len)
        worker = await start_worker(fake, socket_path)
        client = GRPCWorkerClient(socket_path)
        service = create_service(config, client, tokenizer, defaults)
        chat = ChatServer(config, service)
        listener = bind(config)
        rest = RESTServer(config, service, 1)
        serving = asyncio.create_task(rest.serve([listener]))
        stack = Stack(
            config, service, raw, f"http://127.0.0.1:{listener.getsockname()[1]}",
            f"127.0.0.1:{chat.port}", asyncio.get_running_loop(), asyncio.Event(), rest,
        )  # fmt: skip
        box.append(stack)
        await chat.start()
        started.set()
        await stack.ended.wait()
        rest.should_exit = True
        await serving
        await chat.stop(0)
        await client.close()
        await worker.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(PATIENCE)
    try:
        yield box[0]
    finally:
        box[0].loop.call_soon_threadsafe(box[0].ended.set)
        thread.join(PATIENCE)
        assert not thread.is_alive()
