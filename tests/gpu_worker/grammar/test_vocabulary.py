"""The bytes of tokens, of a directory and of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import llguidance
import pytest

from gpu_worker.grammar.vocabulary import VocabularyError, read_vocabulary

MODEL = Path(__file__).parents[3] / "models" / "carrel-nano"
END = 4
# by ggml's numbers
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_gguf(path: Path, kind: str, tokens: list[str], sorts: list[int]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(sorts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_gguf_file_has_the_tokens_of_the_directory_that_it_was_made_of(tmp_path: Path) -> None:
    of_directory = read_vocabulary(llguidance, MODEL, (END,))
    saved = json.loads((MODEL / "tokenizer.json").read_text())
    names = sorted(saved["model"]["vocab"], key=saved["model"]["vocab"].__getitem__)
    special = {token["content"] for token in saved["added_tokens"]}
    sorts = [CONTROL if name in special else NORMAL for name in names]
    of_file = read_vocabulary(llguidance, write_gguf(tmp_path / "m.gguf", "gpt2", names, sorts), (END,))
    assert (of_file.vocab_size, list(of_file.eos_tokens)) == (of_directory.vocab_size, [END])
    for token_id in range(of_file.vocab_size):
        assert of_file.is_special_token(token_id) == of_directory.is_special_token(token_id)
        assert of_file.decode_bytes([token_id]) == of_directory.decode_bytes([token_id])
    # where bytes are forced, both allow the one token that the text begins with, or a shorter one
    text = '{"the title": [true, false]}'
    schema = {"properties": {"the title": {"const": [True, False]}}, "required": ["the title"]}
    for vocabulary in (of_directory, of_file):
        grammar = llguidance.LLMatcher.grammar_from_json_schema({"type": "object", **schema})
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        for token_id in of_directory.tokenize_str(text):
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            assert bits >> token_id & 1
            assert bits.bit_count() < 300
            assert matcher.consume_token(token_id)
        assert matcher.is_stopped()


def test_sentence_pieces_have_spaces_and_single_bytes(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xE4>", "\u2581the", "ü", "<tool>"]
    sorts = [UNKNOWN, CONTROL, CONTROL, BYTE, BYTE, NORMAL, NORMAL, USER_DEFINED]
    vocabulary = read_vocabulary(llguidance, write_gguf(tmp_path / "m.gguf", "llama", tokens, sorts), (2,))
    found = [vocabulary.decode_bytes([token_id]) for token_id in range(3, 8)]
    assert found == [b"\n", b"\xe4", b" the", "ü".encode(), b"<tool>"]
    assert [vocabulary.is_special_token(token_id) for token_id in (0, 2, 7)] == [True, True, False]


def test_a_model_without_tokens_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match="json: put"):
        read_vocabulary(llguidance, tmp_path, (2,))
    with pytest.raises(VocabularyError, match="model 'bert'; supported: gpt2, llama"):
        read_vocabulary(llguidance, write_gguf(tmp_path / "m.gguf", "bert", ["a"], [NORMAL]), (0,))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(VocabularyError, match="cannot be read"):
        read_vocabulary(llguidance, tmp_path, (2,))
