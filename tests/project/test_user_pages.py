"""The pages for users name models, messages and commands that are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from unittest.mock import Mock

import pytest
from checkout import PACKAGES, ROOT, sources

from benchmarks.commands import module_of
from carrel.cli import build_parser
from carrel.process.command_line import Parser, add_options
from carrel.process.settings import read
from carrel.serve.options import ServeOptions
from gateway.config import GatewayConfig
from gateway.rest.server import RESTServer
from gpu_worker.models.families import FAMILIES
from gpu_worker.models.gguf_config import ARCHITECTURES

DOCS = ROOT / "docs"


def commands() -> Iterator[str]:
    """Yield the arguments of each `carrel serve` on a line of a console or in a table's cell."""
    for name in ("models.md", "tuning.md", "clients.md", "agents.md"):
        yield from re.findall(
            r"(?:^\$ .*?|`)carrel serve *([^#`\n]*)", (DOCS / name).read_text(), re.MULTILINE
        )


def texts_of_the_code() -> Iterator[str]:
    """Yield the text of each file, with literals that continue on the next line joined."""
    for _, text in sources(*PACKAGES):
        yield re.sub(r'"\s*\n\s*f?"', "", text)


def test_the_page_of_models_has_every_family() -> None:
    page = (DOCS / "models.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)[1:] == list(FAMILIES)
    told = re.search(r"GGUF files: architectures (.*?),? quantised", page)
    assert told
    assert re.findall(r"`([\w-]+)`", told[1]) == list(ARCHITECTURES)


def test_every_message_is_one_of_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    cells = re.findall(r"^\| (.+?) \| ", page, re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 30
    texts = "\0".join(texts_of_the_code())
    assert [message for message in messages if message not in texts] == []


def blocks() -> Iterator[str]:
    """Yield the lines of each page, a line that continues on the next joined with it."""
    for page in (*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))):
        text = page.read_text()
        for block in re.findall(
            r"^```\w*\n(.*?)^```|((?:^    carrel .*\n)+)", text, re.MULTILINE | re.DOTALL
        ):
            yield re.sub(r" *\\\n *", " ", "".join(block))


def test_every_command_of_a_block_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        command
        for block in blocks()
        for command in re.findall(r"^ *(?:\$ )?(?:\w+=\S* )*(carrel [a-z].*)$", block, re.MULTILINE)
    ]
    assert len(lines) > 20
    refused = []
    for line in lines:
        for command in re.sub(r"\$i\b|\bPID\b", "0", line.replace(" &", "; ")).split(";"):
            words = [word for word in shlex.split(command, comments=True) if not word.startswith("$")]
            if words[:1] != ["carrel"] or len(words) < 2:
                continue
            if words[1] == "bench" and words[2:]:
                parser, given = Parser(), words[3:]
                import_module(module_of(words[2])).add_arguments(parser)
            else:
                given = words[1:]
                parser, _ = build_parser(given)
            try:
                parser.parse_args(given)
            except SystemExit:
                refused.append(f"{command}: {capsys.readouterr().err.splitlines()[-1]}")
    assert refused == []


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_every_command_is_taken(command: str) -> None:
    parser = Parser(prog="carrel serve")
    add_options(parser, ServeOptions)
    assert read(ServeOptions, vars(parser.parse_args(shlex.split(command)))).options


def test_nginx_closes_its_idle_connections_before_carrel_does() -> None:
    """Else a POST may meet a connection that has just been closed, and nginx answers 502."""
    found = re.search(r"^ +keepalive_timeout (\d+)s;", (DOCS / "clients.md").read_text(), re.MULTILINE)
    assert found
    config = GatewayConfig(model="m", worker="unix:w")
    server = RESTServer(config, Mock(), 1)
    assert int(found[1]) < min(server.config.timeout_keep_alive, config.header_timeout_s)
