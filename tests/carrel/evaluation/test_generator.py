"""The fact and document generator: disjoint splits, exact lengths, independent tokenisation."""

from __future__ import annotations

import lzma
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from carrel.evaluation import corpus, documents, facts, words
from carrel.evaluation.scoring import Rate, exact_match

MODEL = Path(__file__).parents[3] / "models" / "carrel-nano"
LINE = "The rain went on, and the old man of the hill told them what he had seen in the town by the sea. "


@pytest.fixture(scope="module")
def codec() -> documents.Codec:
    return documents.Codec(Tokenizer.from_file(str(MODEL / "tokenizer.json")))


@pytest.fixture(scope="module")
def book(codec: documents.Codec) -> documents.TokenizedBook:
    paragraphs = [
        "".join(f"In year {i} it was so. {LINE}" for i in range(n, n + 3)).strip() for n in range(300)
    ]
    return documents.tokenize_book(codec, corpus.Book("rain", "\n\n".join(paragraphs)))


def test_word_pools_of_the_splits_are_disjoint() -> None:
    for first, second in combinations(words.SPLITS, 2):
        shared = {w.lower() for w in words.pools(first).words()} & {
            w.lower() for w in words.pools(second).words()
        }
        assert not shared
    assert {"amber", "fox"} <= words.pools("eval").words()


def draw(kind: str, rng: Random, split: str) -> facts.Fact:
    return facts.draw_set([kind], rng, words.pools(split))[0]


@pytest.mark.parametrize("kind", ["number", "hex"])
def test_values_of_the_splits_are_disjoint(kind: str) -> None:
    drawn = {split: {draw(kind, Random(i), split).answer for i in range(300)} for split in words.SPLITS}
    assert not any(drawn[first] & drawn[second] for first, second in combinations(words.SPLITS, 2))


@pytest.mark.parametrize("kind", facts.KINDS)
def test_a_fact_states_its_key_and_answer(kind: str) -> None:
    fact = draw(kind, Random(3), "eval")
    stated = " ".join(fact.sentences)
    assert fact.answer in stated
    assert fact.key in stated
    assert fact.key in fact.question


def test_keys_of_a_set_differ() -> None:
    drawn = facts.mixed(32, Random(0), words.pools("eval"))
    assert len({fact.key for fact in drawn}) == 32


@pytest.mark.parametrize("style", documents.STYLES)
@pytest.mark.parametrize("num_tokens", [700, 1024, 4000])
def test_prompt_hits_its_length_and_tokenises_as_a_whole(codec, book, style: str, num_tokens: int) -> None:
    rng = Random(num_tokens)
    drawn = facts.mixed(8, rng, words.pools("eval"))
    made = documents.prompt(codec, book, drawn, 2, num_tokens, rng, style)
    assert num_tokens - 40 <= len(made.token_ids) <= num_tokens
    text = codec.tokenizer.decode(made.token_ids.tolist(), skip_special_tokens=False)
    assert codec.encode(text) == made.token_ids.tolist()
    context = codec.tokenizer.decode(made.context_ids.tolist(), skip_special_tokens=False)
    assert codec.encode(context) == made.context_ids.tolist()
    assert all(sentence in text for fact in drawn for sentence in fact.sentences)


def test_documents_are_reproducible(codec, book) -> None:
    drawn = facts.mixed(4, Random(1), words.pools("dev"))
    first, second = (documents.build(codec, book, drawn, 900, Random(5)) for _ in range(2))
    assert first.token_ids.tolist() == second.token_ids.tolist()


def test_what_does_not_fit_is_refused(codec, book) -> None:
    with pytest.raises(documents.DocumentError, match="longer document"):
        documents.build(codec, book, facts.mixed(16, Random(0), words.pools("eval")), 100, Random(0))
    with pytest.raises(documents.DocumentError, match="longer book"):
        documents.build(codec, book, (), 10_000_000, Random(0))


def test_corpus_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(corpus.CorpusError, match="no book directory"):
        corpus.load(tmp_path / "none", "train")
    with pytest.raises(corpus.CorpusError, match="unknown split"):
        corpus.load(tmp_path, "test")


def test_corpus_keeps_the_tuning_books_apart(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for name in (*corpus.DEV_BOOKS, "someone_a-book"):
        with lzma.open(tmp_path / "train" / f"{name}.txt.xz", "wt", encoding="utf-8") as file:
            file.write("Some text.")
    assert [b.name for b in corpus.load(tmp_path, "train")] == ["someone_a-book"]
    assert {b.name for b in corpus.load(tmp_path, "dev")} == set(corpus.DEV_BOOKS)


def test_exact_match_is_of_the_whole_answer() -> None:
    assert exact_match(" 48213.\n", "48213")
    assert not exact_match("48213 or so", "48213")


def test_wilson_interval() -> None:
    low, high = Rate(90, 100).interval
    assert (round(low, 3), round(high, 3)) == (0.826, 0.945)
    with pytest.raises(ValueError, match="no rate"):
        Rate(3, 2)
