"""Servers started for the loads of the page, and what is there already left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from ports import free_port
from tokenizers import Tokenizer as Vocabulary

from benchmarks import under_load
from benchmarks.load.traffic import TrafficClass
from benchmarks.shapes import SHAPES
from benchmarks.under_load import write_random_model
from carrel.serve.model import BUNDLED
from gateway.tokenizer import load_tokenizer

SHAPE = SHAPES["llama-3.1-8b"]
# A `carrel` whose server is ready at once, and whose `bench serve` writes a file and ends with a code.
STAND_IN = """
import sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

def named(flag):
    return sys.argv[sys.argv.index(flag) + 1]

if sys.argv[1] == "bench":
    Path(named("--json")).write_text("{{}}")
    sys.exit({code})
(Path.cwd() / "ready").touch()
HTTPServer(("127.0.0.1", int(named("--port"))), SimpleHTTPRequestHandler).serve_forever()
"""
NAMES = ["chats", "mixed", "batch", "mixed_default", "known_full", "known_snapkv", "known_auto"]


def test_every_id_of_a_random_model_has_text(tmp_path: Path) -> None:
    write_random_model(tmp_path / "model", SHAPE)
    tokenizer, bundled = load_tokenizer(tmp_path / "model", None), load_tokenizer(BUNDLED, None)
    num_bundled, num_ids = (
        Vocabulary.from_file(str(path / "tokenizer.json")).get_vocab_size()
        for path in (BUNDLED, tmp_path / "model")
    )
    assert num_ids == SHAPE.vocab_size
    own = range(num_bundled, num_ids)
    texts = {tokenizer.decode([token]) for token in own}
    assert len(texts) == len(own)
    assert not any("\N{REPLACEMENT CHARACTER}" in text or not text for text in texts)
    text = "A river w8192, <|end|>"
    assert tokenizer.encode(text, True) == bundled.encode(text, True)


@pytest.mark.parametrize("shrink", [1, 64])
def test_each_load_is_traffic_that_bench_serve_takes(shrink: int) -> None:
    loads = [load for server in under_load.servers(shrink) for load in server.loads]
    assert [load.name for load in loads] == NAMES
    for load in loads:
        assert load.arguments[0] == "--traffic"
        for word in load.arguments[1:]:
            if word.startswith("--"):
                break
            assert TrafficClass.parse(word).num_tokens(0) <= 100_000 // shrink


@pytest.mark.parametrize("policy", ["full", "snapkv", "auto"])
def test_known_turns_are_of_three_conversations_one_after_the_other(policy: str) -> None:
    loads = [load for server in under_load.servers(1) for load in server.loads]
    (words,) = (load.arguments for load in loads if load.name == f"known_{policy}")
    turns = TrafficClass.parse(words[words.index("--traffic") + 1])
    assert (turns.turns, turns.count, turns.at_once) == (2, 3, 1)
    # A start that they shared would be known to all but the first.
    assert (turns.shared_tokens, turns.num_tokens(0)) == (0, 32_200)


def test_a_load_that_has_its_json_is_not_run_again(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"serve_{name}_here.json").write_text("{}")
    assert under_load.main(["--out", str(tmp_path)]) == 0


def test_a_load_that_nobody_knows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        under_load.main(["--out", str(tmp_path), "--loads", "chats", "chants"])
    assert "no load is named chants; there are chats, mixed" in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model-shape", "tiny", "--arena-bytes", "1PiB", "--loads", "batch", "--out", str(tmp_path)]
    options += ["--port", str(free_port())]
    assert under_load.main(options) == 1
    assert "carrel serve ended with" in (error := capsys.readouterr().err)
    assert "1PiB" in error or "1125899906842624" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [0, 1])
def test_a_load_of_which_nothing_is_answered_has_no_json(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "carrel").mkdir()
    (tmp_path / "carrel" / "__main__.py").write_text(STAND_IN.format(code=code))
    monkeypatch.setattr(under_load, "CHECKOUT", tmp_path)
    options = ["--model-shape", "tiny", "--loads", "batch", "--out", str(tmp_path / "out")]
    assert under_load.main([*options, "--port", str(free_port())]) == code
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["serve_batch_here.json"] * (1 - code)
