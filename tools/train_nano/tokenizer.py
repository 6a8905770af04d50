"""Trains the byte-level BPE tokenizer and writes the files by which Hugging Face libraries load it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from carrel.evaluation.documents import SPECIAL_TOKENS

# A run of newlines is always a piece of its own, so the text up to a blank line tokenises alike whatever follows it:
# a context can be prefilled before its question is known. Digits stand alone: numbers are copied digit by digit.
PIECE_PATTERN = r"\n+| ?\p{L}+(?:[’']\p{L}+)*| ?[^\s\p{L}\p{N}]+|\p{N}|[^\S\n]+(?!\S)|[^\S\n]+"

CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role \"' + message['role'] + '\": use system, user or assistant') -}}"
    "{%- endif -%}"
    # an answer's first word is tokenized as inside a text, so that it can be copied from one
    "{%- set lead = ' ' if message['role'] == 'assistant' else '' -%}"
    "{{- '<|' + message['role'] + '|>' + lead + (message['content'] | trim) + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains the tokenizer; ids of the special tokens are their places in `SPECIAL_TOKENS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json (with the chat template) and special_tokens_map.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    bos, _, _, _, end, pad = SPECIAL_TOKENS
    names = {"bos_token": bos, "eos_token": end, "pad_token": pad}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
