"""Token ids to text: as a growing answer, and each token on its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from gateway.token_texts import Detokenizer, TokenTexts
from gateway.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "the quick brown fox",
    "emoji 🦊🦊👩‍👩‍👧‍👦 and 你好，世界 end",
    "  leading and trailing  ",
    "ünïcödé \n\n tabs\t and € signs",
    "🦊",
    "\N{REPLACEMENT CHARACTER} kept \N{REPLACEMENT CHARACTER}",
]


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir, None)


def stream(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*[detokenizer.push(token_id) for token_id in token_ids], detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "the", "你", "<|bos|><|user|>"])
def test_pieces_add_up_to_the_text(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    pieces = stream(
        Detokenizer(tokenizer.decode, prompt_ids), tokenizer.encode(text, add_special_tokens=False)
    )
    assert "".join(pieces) == text


def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    text = "a🦊b你c"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(token_ids) > len(text)
    pieces = stream(Detokenizer(tokenizer.decode, ()), token_ids)
    assert [piece for piece in pieces if piece] == list(text)


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("the fox", add_special_tokens=False), 1]
    assert "".join(stream(Detokenizer(tokenizer.decode, ()), token_ids)) == "the fox"


def test_garbage_costs_the_same_at_any_length(tokenizer: Tokenizer) -> None:
    longest = 0

    def decode(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return tokenizer.decode(token_ids)

    half = tokenizer.encode("🦊", add_special_tokens=False)[0]
    detokenizer = Detokenizer(decode, ())
    pieces = stream(detokenizer, [half] * 2000)
    assert longest < 50
    assert set("".join(pieces)) == {"\N{REPLACEMENT CHARACTER}"}
    detokenizer = Detokenizer(decode, ())
    pieces = stream(detokenizer, [*[half] * 40, *tokenizer.encode(" then 你好", add_special_tokens=False)])
    assert "".join(pieces).endswith(" then 你好")


def test_random_tokens_add_up_while_bytes_are_valid(tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    for _ in range(50):
        text = "".join(rng.choice("ab 🦊你é\n€") for _ in range(rng.randrange(1, 40)))
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(stream(Detokenizer(tokenizer.decode, ()), token_ids)) == text


def test_spaces_survive_a_decoder_that_strips_them() -> None:
    vocab = {"▁the": 0, "▁fox": 1, "es": 2, "<0xE4>": 3, "<0xBD>": 4, "<0xA0>": 5}
    raw = RawTokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    token_ids = [0, 1, 2, 3, 4, 5, 1, 3, 4, 5, 3, 4, 5]
    pieces = stream(Detokenizer(lambda ids: raw.decode(ids), [0]), token_ids)
    assert "".join(pieces) == " the foxes你 fox你你"


PIECES = ["<unk>", "a", "▁fox", "fox", "▁", "<0xE4>", "<0xBD>", "<0xA0>"]


def test_a_vocabulary_of_bytes(model_dir: Path) -> None:
    backend = RawTokenizer.from_file(str(model_dir / "tokenizer.json"))
    texts = TokenTexts(backend)
    text = "the fox 🦊 你\n"
    ids = backend.encode(text, add_special_tokens=False).ids
    assert b"".join(texts.bytes(each) for each in ids) == text.encode()
    assert texts.text(backend.token_to_id("<|end|>")) == "<|end|>"


def test_pieces_keep_the_space_at_their_start() -> None:
    backend = RawTokenizer(models.BPE(vocab={each: at for at, each in enumerate(PIECES)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = TokenTexts(backend)
    assert [texts.text(at) for at in (1, 2, 3, 4)] == ["a", " fox", "fox", " "]
    assert [texts.bytes(at) for at in (2, 5, 6, 7)] == [b" fox", b"\xe4", b"\xbd", b"\xa0"]
