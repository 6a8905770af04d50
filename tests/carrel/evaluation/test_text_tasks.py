"""The tasks that write text: what they ask stands in it, and it has the length that was asked for."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from carrel.errors import EvaluationError
from carrel.evaluation.scoring import bootstrap, contained, paired
from carrel.evaluation.suite import Library, Suite
from carrel.evaluation.tasks import TEXT_TASKS, Filler, Text, expand

MODEL = Path(__file__).parents[3] / "models" / "carrel-nano"
# what they want is said nowhere, but follows
DERIVED = ("labels",)


def write(task: str, num_chars: int, seed: int = 1) -> Text:
    return TEXT_TASKS[task].write(num_chars, Random(seed), Filler())


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_a_document_holds_its_answers_and_grows(task: str) -> None:
    short, long = write(task, 6_000), write(task, 20_000)
    assert short == write(task, 6_000)
    assert short != write(task, 6_000, seed=2)
    assert 5_000 < len(short.context) < 7_500
    assert 18_000 < len(long.context) < 22_000
    for text in (short, long):
        assert text.answers
        if task not in DERIVED:
            assert [answer for answer in text.answers if answer not in text.context] == []
        assert [answer for answer in text.answers if answer in text.question] == []


def test_a_chain_is_told_in_order_beside_an_example() -> None:
    text = write("vt", 6_000)
    lines = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text.context)[-5:]
    value = lines[0][1]
    assert value in text.question
    assert tuple(name for name, _ in lines) == text.answers
    assert [before for _, before in lines[1:]] == list(text.answers[:-1])


def test_common_and_frequent_words_are_the_commonest() -> None:
    listed = re.findall(r"\d+\. (\w+)", write("cwe", 20_000).context.rpartition("\n\n")[2])
    counts = {word: listed.count(word) for word in set(listed)}
    assert {word for word, count in counts.items() if count == 30} == set(write("cwe", 20_000).answers)
    assert {count for count in counts.values()} == {30, 3}
    coded = write("fwe", 20_000)
    words = coded.context.split()
    assert sorted(set(words), key=words.count)[::-1][:4] == ["...", *coded.answers]


def test_earlier_turns_stand_with_their_answers() -> None:
    text = next(found for seed in range(20) if (found := write("turns", 6_000, seed)).kind == "turn 3")
    assert text.question.count("What is") == 3
    assert len(re.findall(r"text is \d{7}\.\n", text.question)) == 2


def test_groups_stand_for_tasks() -> None:
    assert expand(["turns", "ruler", "vt"])[:2] == ["turns", "niah_single_1"]
    assert len(expand(["turns", "ruler"])) == len(expand(["ruler"])) + 1


def test_scores() -> None:
    assert contained("It is 123 or 45, said AB", ("123", "ab", "9")) == pytest.approx(2 / 3)


def test_intervals_are_of_documents_and_repeat() -> None:
    half = bootstrap([0.0, 1.0] * 50)
    assert (half.value, half.n) == (0.5, 100)
    assert half == bootstrap([0.0, 1.0] * 50)
    assert (half.low, half.high) == (pytest.approx(0.4, abs=0.02), pytest.approx(0.6, abs=0.02))
    # Documents differ much, and the two policies on each of them little.
    theirs = {index: float(index % 2) for index in range(100)}
    ours = {index: value - 0.25 for index, value in theirs.items()}
    lost = paired(ours, theirs)
    assert lost is not None
    assert (lost.value, lost.low, lost.high) == (-0.25, -0.25, -0.25)
    assert paired({1: 0.0}, {2: 0.0}) is None


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    said = " ".join(f"In the year {year} nothing happened in the village. It rained." for year in range(900))
    (folder / "chronicle.txt").write_text(said)
    return folder


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_prompt_has_its_length_and_is_split_before_the_question(texts: Path, is_chat: bool) -> None:
    suite = Suite(MODEL, Library(texts=texts), 1, is_chat)
    question = suite.question("niah_single_2", 1000, 3)
    assert 980 < len(question.context_ids) + len(question.question_ids) + question.max_tokens <= 1000
    context = suite.decode(question.context_ids)
    assert question.answers[0] in context
    assert "nothing happened in the village" in context
    assert "What is" not in context
    assert suite.decode(question.question_ids).strip().endswith("text is")
    assert question.is_right(f" {question.answers[0]}, and more")
    assert question == Suite(MODEL, Library(texts=texts), 1, is_chat).question("niah_single_2", 1000, 3)


def test_what_cannot_be_asked_is_explained(tmp_path: Path) -> None:
    suite = Suite(MODEL, Library(), 1)
    with pytest.raises(EvaluationError, match="the shortest has more"):
        suite.question("cwe", 256, 0)
    with pytest.raises(EvaluationError, match="need --books"):
        suite.question("mixed", 1024, 0)
    with pytest.raises(EvaluationError, match=r"no \*\.txt"):
        Suite(MODEL, Library(texts=tmp_path), 1).question("qa", 1024, 0)
