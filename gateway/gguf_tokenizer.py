"""The tokenizer that a GGUF file describes: vocabulary, merges and special tokens are metadata there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from carrel.process.gguf_file import GGUFError, GGUFHead, read_gguf

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"
_OTHERWISE = "name a directory that has the model's tokenizer.json with --tokenizer"

_SYMBOLS, _SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a byte-level vocabulary cuts text before its merges. `pattern` None: as GPT-2 does, digits one by one where
    `single_digits` says so. ignores_merges: a piece that is in the vocabulary is a token at once."""

    pattern: str | None = None
    single_digits: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False
    composes: bool = False


_LLAMA3 = _Splitting(rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}", ignores_merges=True, adds_bos=True)
_QWEN2 = _Splitting(rf"{_WORDS}|\p{{N}}|{_SYMBOLS}|{_SPACES}", composes=True)
_TEKKEN = _Splitting(
    rf"{_CASED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    ignores_merges=True,
    adds_bos=True,
)
# tokenizer.ggml.pre
_SPLITTINGS = {
    "gpt-2": _Splitting(),
    "smollm": _Splitting(single_digits=True),
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


def read_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Tokenizer and chat template of a GGUF file. Raises GGUFError where they cannot be used."""
    head = read_gguf(path)
    kind = head.metadata.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise GGUFError(
            f"{path} has a vocabulary of model {kind!r}; supported: {', '.join(_KINDS)}: {_OTHERWISE}"
        )
    vocabulary = _Vocabulary.read(head)
    tokenizer, adds_bos = _KINDS[str(kind)](head, vocabulary)
    added = [
        AddedToken(text, normalized=False, special=sort == _CONTROL)
        for text, sort in zip(vocabulary.texts, vocabulary.sorts, strict=True)
        if sort in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    bos = vocabulary.named("bos")
    if bos is not None and head.metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=None, special_tokens=[(bos, vocabulary.texts.index(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=vocabulary.named("eos"),
        unk_token=vocabulary.named("unknown"),
        pad_token=vocabulary.named("padding"),
        chat_template=head.metadata.get("tokenizer.chat_template"),
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """texts: by token id. sorts: what each is, by ggml's numbers."""

    head: GGUFHead
    texts: list[str]
    sorts: list[int]

    @classmethod
    def read(cls, head: GGUFHead) -> _Vocabulary:
        texts = _array(head, "tokens")
        sorts = _array(head, "token_type") if "tokenizer.ggml.token_type" in head.metadata else []
        return cls(head, texts, sorts or [_NORMAL] * len(texts))

    def ids(self) -> dict[str, int]:
        return {text: token_id for token_id, text in enumerate(self.texts)}

    def named(self, name: str) -> str | None:
        """The text of the token that the file names as `name`; None where it names none."""
        token_id = self.head.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            return None
        if not isinstance(token_id, int) or token_id >= len(self.texts):
            raise GGUFError(
                f"{self.head.path}: tokenizer.ggml.{name}_token_id is {token_id!r}, which is no token"
            )
        return self.texts[token_id]


def _byte_level(head: GGUFHead, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = head.metadata.get("tokenizer.ggml.pre")
    if name not in _SPLITTINGS:
        raise GGUFError(
            f"{head.path} splits text as {name!r}; supported: {', '.join(_SPLITTINGS)}: {_OTHERWISE}"
        )
    splitting = _SPLITTINGS[str(name)]
    merges = [(left, right) for left, _, right in (text.partition(" ") for text in _array(head, "merges"))]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids(), merges, ignore_merges=splitting.ignores_merges))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.pattern:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), "isolated"))
    elif splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitting.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.adds_bos


def _sentence_piece(head: GGUFHead, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE, as Llama 2 and the first Mistrals have it: bytes for what the vocabulary lacks."""
    ids, scores = vocabulary.ids(), _array(head, "scores")
    if len(scores) != len(vocabulary.texts):
        raise GGUFError(
            f"{head.path} has {len(scores)} scores for {len(vocabulary.texts)} tokens; download it again"
        )
    # it joins the two neighbours that make the best token, so every way to make a token is a merge of its rank
    ranked = sorted(
        (token_id for token_id, sort in enumerate(vocabulary.sorts) if sort == _NORMAL),
        key=lambda token_id: -scores[token_id],
    )
    merges = [
        (text[:cut], text[cut:])
        for text in (vocabulary.texts[token_id] for token_id in ranked)
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    unknown = vocabulary.named("unknown")
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    leads = bool(head.metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if leads else []), normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if leads else []),
        ]
    )
    return tokenizer, True


# tokenizer.ggml.model -> the tokenizer, and whether it begins a text with its begin token where the file does not say
_KINDS: dict[str, Callable[[GGUFHead, _Vocabulary], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
}


def _array(head: GGUFHead, name: str) -> list:
    values = head.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise GGUFError(f"{head.path} has no tokenizer.ggml.{name}: {_OTHERWISE}")
    return values
