"""The trained model's directory, and the parts of its training that need no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from carrel.evaluation import corpus, documents, words
from tools.train_nano import evaluate, export, names, producers, quotes, samples
from tools.train_nano.config import Phase, Recipe
from tools.train_nano.model import Llama

transformers = pytest.importorskip("transformers")

MODEL = Path(__file__).parents[3] / "models" / "carrel-nano"


@pytest.fixture(scope="module")
def codec() -> documents.Codec:
    return documents.Codec(Tokenizer.from_file(str(MODEL / "tokenizer.json")))


@pytest.fixture(scope="module")
def book(codec: documents.Codec) -> documents.TokenizedBook:
    line = "It was a long day, and nobody in the house could say where the time had gone since the morning. "
    text = "\n\n".join((f"Chapter {n}. " + line * 4).strip() for n in range(400))
    return documents.tokenize_book(codec, corpus.Book("day", text))


@pytest.fixture
def tiny() -> Llama:
    torch.manual_seed(0)
    return Llama(Recipe().smoke().model)


def test_export_gives_the_logits_of_transformers(tiny: Llama, tmp_path: Path) -> None:
    export.save_model(tiny, tmp_path, torch.float32)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 8192, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(tiny.logits(tiny(ids)), peer(ids).logits, atol=1e-5, rtol=1e-4)


def test_bundled_weights_are_small_enough() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= export.MAX_WEIGHT_BYTES


def test_decoding_matches_the_whole_forward_pass(tiny: Llama) -> None:
    ids = torch.randint(0, 8192, (2, 20))
    lengths = torch.tensor([14, 9])
    with torch.no_grad():
        whole = tiny.logits(tiny(ids))
        logits, cache = tiny.prefill(ids, lengths, 4)
        for step in range(4):
            for row in range(2):
                torch.testing.assert_close(
                    logits[row], whole[row, lengths[row] + step - 1], atol=1e-5, rtol=1e-4
                )
            logits = tiny.decode(ids[torch.arange(2), lengths + step], cache)


def test_chat_template() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " A text.\n\nWhat? "}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>Be brief.<|end|><|user|>A text.\n\nWhat?<|end|><|assistant|>"
    turns += [{"role": "assistant", "content": "48213"}, {"role": "user", "content": "Sure?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text.endswith("What?<|end|><|assistant|> 48213<|end|><|user|>Sure?<|end|>")
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


def test_special_tokens_have_their_ids() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.convert_tokens_to_ids(list(documents.SPECIAL_TOKENS)) == list(range(6))
    assert json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"] == [documents.END]


def test_bundled_model_finds_a_needle(codec, book) -> None:
    model = export.load_model(MODEL).float()
    rng = Random(4)
    prompts = [
        evaluate.draw_prompt("one needle", codec, [book], words.pools("eval"), 512, rng, style)
        for style in documents.STYLES
    ]
    assert [text.strip() for text in evaluate.answer(model, codec, prompts)] == [p.answer for p in prompts]


@pytest.mark.parametrize("plain", [0.0, 1.0])
def test_sequences_are_full_and_reproducible(codec, book, plain: float) -> None:
    builder = samples.SampleBuilder(codec, [book], [words.pools("train")], [1.0])
    phase = Phase(1024, 1, 1.0, plain=plain, packed=0.5, text_weight=1.0, lr=(1.0, 1.0))
    first, second = (builder.sequence(phase, Random(7)) for _ in range(2))
    assert first.token_ids.shape == first.classes.shape == (1024,)
    assert np.array_equal(first.token_ids, second.token_ids)
    assert (samples.ANSWER in first.classes) == (plain == 0.0)


def test_answers_are_learned_up_to_their_end(codec, book) -> None:
    builder = samples.SampleBuilder(codec, [book], [words.pools("train")], [1.0])
    phase = Phase(1024, 1, 1.0, plain=0.0, packed=0.0, text_weight=1.0, lr=(1.0, 1.0))
    for seed in range(20):
        made = builder.sequence(phase, Random(seed))
        learned = made.token_ids[made.classes == samples.ANSWER]
        assert len(learned) == 0 or learned[-1] == documents.END


def test_invented_words_are_new_and_reproducible() -> None:
    first = names.invent(500, Random(3), reserved=())
    assert len(set(first)) == 500
    assert all(word.isalpha() and word.islower() for word in first)
    assert names.invent(500, Random(3), reserved=()) == first
    assert first[0] not in names.invent(500, Random(3), reserved={first[0]})


def test_training_pools_hold_no_word_of_other_splits() -> None:
    text = "He saw an amber fox near Ada Abbott, and Ada Abbott saw Karsten. " * 40
    made = producers.training_pools([corpus.Book("fox", text)], seed=1)
    reserved = {word.lower() for split in ("dev", "eval") for word in words.pools(split).words()}
    assert len(made) == len(Recipe().pool_weights)
    assert len(made[2].first_names) > producers.NUM_INVENTED > len(made[1].first_names)
    for one in made:
        assert not reserved & {word.lower() for word in one.words()}


def test_oversized_weights_are_refused(tmp_path: Path) -> None:
    model = Llama(replace(Recipe().model, num_hidden_layers=9))
    with pytest.raises(export.ExportError, match="make the model smaller"):
        export.save_model(model, tmp_path)


def test_quote_continues_the_document(codec: documents.Codec, book: documents.TokenizedBook) -> None:
    made = quotes.quote_prompt(codec, book, 900, Random(2))
    quoted = made.question.split('"')[1]
    assert f"{quoted} {made.answer}" in codec.decode(made.document.token_ids)
