"""`python -m benchmarks.under_load`: every load of docs/benchmarks.md, "Under load", on servers started for them.

A load whose JSON is there is not run again: a run that was cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.children import LAST_WORDS, wait_or_kill
from benchmarks.errors import BenchmarkError
from benchmarks.shapes import SHAPES, ModelShape
from carrel.process.command_line import at_least, flag
from carrel.process.version import CHECKOUT
from carrel.serve.model import BUNDLED

# a blank in the byte-level alphabet of BPE
BLANK = "\u0120"


def write_random_model(folder: Path, shape: ModelShape) -> None:
    """Makes `folder`. Its tokenizer is the bundled model's, with as many words more as the shape has ids more: random
    weights answer with any id, and a server sends no piece for one without text. Text is encoded as before."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.config_fields()))
    for file in BUNDLED.glob("*token*.json"):
        shutil.copy(file, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"{BLANK}w{number}": number for number in range(len(vocab), shape.vocab_size)}
    path.write_text(json.dumps(tokenizer))


POLL_S = 0.5
STOP_S = 60


@dataclass(frozen=True)
class Load:
    """name: its JSON is serve_NAME_LABEL.json. arguments: of `carrel bench serve`."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Server:
    """One `carrel serve` with these options, and the loads that it gets."""

    options: tuple[str, ...]
    loads: tuple[Load, ...]


def servers(shrink: int) -> tuple[Server, ...]:
    """Prompts are a `shrink`-th as long as the page's."""
    chats = f"chats={512 // shrink}+64@3"
    documents = f"documents={100_000 // shrink}+64x3"
    # one conversation after the other, with nothing in common: the median is of what is warm
    turns = f"turns={32_000 // shrink}:{max(8, 200 // shrink)}+64*2x3/1"
    beside = ("--traffic", chats, documents, "--slo-ttft", "500")

    def second_turn(policy: str, seed: int) -> Load:
        asked = ("--traffic", turns, "--policies", policy, "--budget", "0.2", "--seed", str(seed))
        return Load(f"known_{policy}", asked)

    return (
        Server(
            ("--itl-target-ms", "40"),
            (Load("chats", ("--traffic", chats, "--seed", "5")), Load("mixed", (*beside, "--seed", "3"))),
        ),
        Server(
            ("--policy", "full", "--itl-target-ms", "2000", "--prefill-chunk", str(16_384 // shrink)),
            (Load("batch", ("--traffic", f"batch={16_384 // shrink}+128x16/8")),),
        ),
        Server(
            ("--allowed-policies", "bitkeys", "full", "snapkv", "auto"),
            (
                Load("mixed_default", (*beside, "--seed", "3")),
                second_turn("full", 321),
                second_turn("snapkv", 322),
                second_turn("auto", 323),
            ),
        ),
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.under_load", description=__doc__)
    flag(parser, "--out", "folder of the JSON files", parse=Path, metavar="DIR", required=True)
    parser.add_argument("--label", default="here", metavar="NAME", help="of the machine, in the files' names")
    flag(parser, "--loads", "only these", metavar="NAME", nargs="+")
    flag(parser, "--model-shape", "", "llama-3.1-8b", metavar="NAME", choices=sorted(SHAPES))
    flag(parser, "--budget", "", "2048", metavar="SHARE|N")
    flag(parser, "--arena-bytes", "", "48GiB", metavar="SIZE")
    flag(parser, "--port", "of the gateway", 8102, int, metavar=None)
    flag(parser, "--shrink", "divide the prompts' lengths, for a small machine", 1, at_least(1))
    flag(parser, "--timeout", "of a start and of a load", 300.0, float, metavar="S")
    flag(parser, "--commit", "where the code has no git folder", metavar="HASH")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when a load or a start failed; the others are run all the same."""
    parser = build_parser()
    options = parser.parse_args(argv)
    planned = servers(options.shrink)
    known = [load.name for server in planned for load in server.loads]
    if unknown := set(options.loads or ()) - set(known):
        parser.error(f"--loads: no load is named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = {name for name in options.loads or known if not _json(options, name).exists()}
    num_failed = 0
    for server in planned:
        loads = [load for load in server.loads if load.name in wanted]
        if not loads:
            continue
        try:
            with _running(options, server):
                num_failed += sum(not _ask(options, load) for load in loads)
        except BenchmarkError as error:
            print(error, file=sys.stderr)
            num_failed += len(loads)
    return min(num_failed, 1)


def _json(options: argparse.Namespace, name: str) -> Path:
    return Path(options.out) / f"serve_{name}_{options.label}.json"


def _ask(options: argparse.Namespace, load: Load) -> bool:
    """Run the load, and return whether it was answered."""
    command = [sys.executable, "-m", "carrel", "bench", "serve", *load.arguments]
    command += ["--url", f"http://127.0.0.1:{options.port}", "--json", str(_json(options, load.name))]
    command += ["--commit", options.commit] if options.commit else []
    print(f"{load.name}: {' '.join(load.arguments)}", file=sys.stderr)
    try:
        if subprocess.run(command, cwd=CHECKOUT, timeout=options.timeout, check=False).returncode == 0:
            return True
    except subprocess.TimeoutExpired:
        print(f"{load.name}: not done after {options.timeout:.0f} s", file=sys.stderr)
    # of requests that all failed there is a file too, which would keep the load from being run again
    _json(options, load.name).unlink(missing_ok=True)
    return False


@contextmanager
def _running(options: argparse.Namespace, server: Server) -> Iterator[None]:
    """A `carrel serve` that is ready; it ends with the context. Raises BenchmarkError with its last words."""
    with tempfile.TemporaryDirectory() as name:
        model, log = Path(name) / "model", Path(name) / "serve.log"
        write_random_model(model, SHAPES[options.model_shape])
        arguments = f"{model} --load-format dummy --port {options.port} --grpc-port 0 --max-num-seqs 32"
        arguments += f" --arena-bytes {options.arena_bytes} --budget {options.budget}"
        with log.open("wb") as words:
            process = subprocess.Popen(
                [sys.executable, "-m", "carrel", "serve", *arguments.split(), *server.options],
                stdout=words,
                stderr=words,
                stdin=subprocess.DEVNULL,
                cwd=CHECKOUT,
            )
        try:
            _await_ready(options, process, log)
            yield
        finally:
            process.terminate()
            wait_or_kill(process, STOP_S)


def _await_ready(options: argparse.Namespace, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + options.timeout
    while not _is_ready(options.port):
        if process.poll() is not None or time.monotonic() > until:
            state = "is not ready" if process.poll() is None else f"ended with {process.returncode}"
            raise BenchmarkError(f"carrel serve {state}: {log.read_text(errors='replace')[-LAST_WORDS:]}")
        time.sleep(POLL_S)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
