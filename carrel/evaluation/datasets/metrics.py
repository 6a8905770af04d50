"""The benchmarks' own metrics, from 0 to 1. Several answers: the best of them, unless a metric says otherwise."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from carrel.evaluation.scoring import Metric

ARTICLES = re.compile(r"\b(a|an|the)\b")
NUMBER = re.compile(r"\d+")
DECIMAL = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def best_of(score: Callable[[str, str], float]) -> Metric:
    """Of a score of a prediction and one answer."""

    def metric(prediction: str, answers: Sequence[str]) -> float:
        return max(score(prediction, answer) for answer in answers)

    return metric


def words(text: str) -> list[str]:
    """Lower case, without punctuation and English articles."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return ARTICLES.sub(" ", plain).split()


def word_f1(prediction: str, answer: str) -> float:
    """F1 of the words that both have, as often as both have them."""
    said, wanted = words(prediction), words(answer)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def rouge_l(prediction: str, answer: str) -> float:
    """F1 of the longest common subsequence of words, split at white space."""
    said, wanted = prediction.split(), answer.split()
    common = longest_common(said, wanted)
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def edit_similarity(prediction: str, answer: str) -> float:
    """Of the first line that is code, not a comment or a fence: twice the longest common subsequence of characters over
    both lengths, in whole per cents."""
    lines = (line for line in prediction.lstrip("\n").split("\n") if not re.search(r"`|#|//", line))
    line = next(lines, "")
    both = len(line) + len(answer)
    return round(100 * 2 * longest_common(line, answer) / both) / 100 if both else 1.0


def id_share(prediction: str, answer: str) -> float:
    """The share of the prediction's numbers that equal the answer's first."""
    wanted, said = NUMBER.search(answer), NUMBER.findall(prediction)
    return said.count(wanted[0]) / len(said) if wanted and said else 0.0


def classes_named(classes: Sequence[str]) -> Metric:
    """One over the classes that a prediction names, if the answer is among them; a class whose name is a part of the
    answer's counts only if it is the answer."""

    def score(prediction: str, answer: str) -> float:
        named = [each for each in classes if each in prediction and (each == answer or each not in answer)]
        return 1 / len(named) if answer in named else 0.0

    return best_of(score)


def any_contained(prediction: str, answers: Sequence[str]) -> float:
    return float(any(answer.lower() in prediction.lower() for answer in answers))


def word_said(prediction: str, answers: Sequence[str]) -> float:
    """Whether an answer is one of the words, split at white space and punctuation other than hyphens."""
    said = set(re.split(r"[\s,.:;\"'{}()\[\]]+", prediction))
    return float(any(answer in said for answer in answers))


def last_number(prediction: str, answers: Sequence[str]) -> float:
    """Whether the last number said is an answer."""
    said = DECIMAL.findall(prediction)
    return float(bool(said) and _value(said[-1]) in map(_value, answers))


def option_named(prediction: str, answers: Sequence[str]) -> float:
    """Whether the first capital letter from A to D that stands alone is an answer."""
    said = re.search(r"\b[A-D]\b", prediction)
    return float(said is not None and said[0] in answers)


def first_line(metric: Metric) -> Metric:
    """Of the first line that says something."""

    def of_line(prediction: str, answers: Sequence[str]) -> float:
        return metric(prediction.lstrip("\n").split("\n")[0], answers)

    return of_line


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (1 + len(second))
    for one in first:
        before = 0
        for place, other in enumerate(second, 1):
            before, row[place] = row[place], before + 1 if one == other else max(row[place], row[place - 1])
    return row[-1]


def _value(text: str) -> float:
    return float(text.replace(",", ""))
