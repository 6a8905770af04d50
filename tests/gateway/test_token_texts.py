"""Text and bytes of single tokens, in vocabularies of bytes and in those of pieces with a byte for the rest."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from gateway.token_texts import TokenTexts

PIECES = ["<unk>", "a", "▁fox", "fox", "▁", "<0xE4>", "<0xBD>", "<0xA0>"]


def test_a_vocabulary_of_bytes(model_dir: Path) -> None:
    backend = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    texts = TokenTexts(backend)
    text = "the fox 🦊 你\n"
    ids = backend.encode(text, add_special_tokens=False).ids
    assert b"".join(texts.bytes(each) for each in ids) == text.encode()
    assert texts.text(backend.token_to_id("<|end|>")) == "<|end|>"


def test_pieces_keep_the_space_at_their_start() -> None:
    backend = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(PIECES)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = TokenTexts(backend)
    assert [texts.text(at) for at in (1, 2, 3, 4)] == ["a", " fox", "fox", " "]
    assert [texts.bytes(at) for at in (2, 5, 6, 7)] == [b" fox", b"\xe4", b"\xbd", b"\xa0"]
