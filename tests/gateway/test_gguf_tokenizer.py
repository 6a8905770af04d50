"""A GGUF file's tokenizer is the one that it was made of."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from gateway_stack import SPECIAL, write_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer

from gateway.config import GatewayConfig
from gateway.errors import ConfigError
from gateway.exchange import Message
from gateway.gguf_tokenizer import read_gguf_tokenizer
from gateway.server import load
from gateway.tokenizer import load_tokenizer

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2.gguf"
TEXTS = (
    "The quick brown fox doesn't jump.",
    "  two spaces,\ttabs\r\nand 12345 numbers 3.14",
    "naïve café 日本語 🙂",
    "<|user|>the dog<|end|>",
    "",
)


def write_gguf(path: Path, tokenizer: Tokenizer, specials: tuple[str, ...], **fields: object) -> Path:
    """The metadata that a converter writes of `tokenizer`, whose first tokens are `specials`; None leaves one out."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [3 if token in specials else 6 if token.startswith("<0x") else 1 for token in tokens]
    values: dict[str, object] = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds}
    values["merges"] = [" ".join(pair) for pair in model["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (values | fields).items():
        add = {int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string, list: writer.add_array}
        if value is not None:
            add[type(value)](f"tokenizer.ggml.{key}", value)
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("byte_level"))


def test_a_byte_level_vocabulary(byte_level: Path, tmp_path: Path) -> None:
    raw = Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    path = write_gguf(
        tmp_path / "tiny.gguf", raw, SPECIAL, bos_token_id=0, eos_token_id=1, add_bos_token=True
    )
    config = GatewayConfig(model=str(path), worker="unix:w")
    assert config.model_names == ("tiny",)
    tokenizer, defaults = load(config)
    assert not defaults.HasField("temperature")
    for text in TEXTS:
        ids = raw.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == tuple(ids)
        assert tokenizer.encode(text, add_special_tokens=True) == (0, *ids)
        assert tokenizer.decode(ids) == raw.decode(ids)
    assert tokenizer.render_chat([Message("user", "hi")], {}) == "<|bos|><|user|>hi"


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=names, show_progress=False)
    raw.train_from_iterator(["the quick brown fox jumps over the lazy dog and the other dog " * 5], trainer)
    # only what is special stays whole in a text
    raw = Tokenizer.from_str(json.dumps(json.loads(raw.to_str()) | {"added_tokens": []}))
    raw.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    ids = raw.get_vocab()
    merged = ["".join(pair) for pair in json.loads(raw.to_str())["model"]["merges"]]
    scores = [-float(merged.index(token)) if token in merged else -1e9 for token in sorted(ids, key=ids.get)]
    path = write_gguf(
        tmp_path / "m.gguf", raw, tuple(specials), model="llama", pre=None, merges=None, scores=scores,
        bos_token_id=1, eos_token_id=2, unknown_token_id=0,
    )  # fmt: skip
    tokenizer = load_tokenizer(path, None)
    for text in TEXTS:
        expected = raw.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == tuple(expected)
        # its files say so only if they do not begin with it
        assert tokenizer.encode(text, add_special_tokens=True) == (1, *expected)
        assert tokenizer.decode(expected) == raw.decode(expected)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", "DON|'|T|Ġpay|Ġ12345|/|x|ĊĠ|Ġend"),
        ("smollm", "DON|'|T|Ġpay|Ġ|1|2|3|4|5|/|x|ĊĠ|Ġend"),
        ("llama-bpe", "DON|'T|Ġpay|Ġ|123|45|/x|Ċ|Ġ|Ġend"),
        ("qwen2", "DON|'T|Ġpay|Ġ|1|2|3|4|5|/x|Ċ|Ġ|Ġend"),
        ("tekken", "DON|'T|Ġpay|Ġ|1|2|3|4|5|/x|Ċ|Ġ|Ġend"),
    ],
)
def test_how_text_is_cut(pre: str, pieces: str, byte_level: Path, tmp_path: Path) -> None:
    raw = Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    backend = read_gguf_tokenizer(write_gguf(tmp_path / "m.gguf", raw, SPECIAL, pre=pre)).backend_tokenizer
    cut = backend.pre_tokenizer.pre_tokenize_str("DON'T pay 12345/x\n  end")
    assert "|".join(piece for piece, _ in cut) == pieces


def test_what_cannot_be_used_is_refused(byte_level: Path, tmp_path: Path) -> None:
    raw = Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    for fields, message in (
        ({"model": "rwkv"}, "vocabulary of model 'rwkv'; supported: gpt2, llama"),
        ({"pre": "mpt"}, "splits text as 'mpt'; supported: gpt-2"),
        ({"pre": None}, "splits text as None"),
        ({"tokens": None}, r"has no tokenizer\.ggml\.tokens"),
        ({"token_type": [1, 1]}, "cannot be loaded"),
        ({"bos_token_id": 10_000}, "bos_token_id is 10000, which is no token"),
    ):
        path = write_gguf(tmp_path / "m.gguf", raw, SPECIAL, **fields)
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(path, None)
    (tmp_path / "m.gguf").write_text("GGUF")
    with pytest.raises(ConfigError, match="truncated"):
        load_tokenizer(tmp_path / "m.gguf", None)


@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is not here (`make models/smollm2.gguf`)")
def test_smollm2s_tokens_are_those_of_transformers() -> None:
    tokenizer = load_tokenizer(SMOLLM2, None)
    rival = AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)
    for text in (*TEXTS, "<|im_start|>user\nhi<|im_end|>\n"):
        assert list(tokenizer.encode(text, add_special_tokens=True)) == rival(text).input_ids
    chat = [{"role": "user", "content": "hi"}]
    rendered = rival.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat([Message("user", "hi")], {}) == rendered
