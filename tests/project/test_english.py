"""Hold the countable rules of plain technical English: on pages and in first lines of docstrings.

A page that is added joins `PAGES`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 25

# Each page with the number of longer sentences that it may still have.
PAGES = {
    "CONTRIBUTING.md": 0,
    "SECURITY.md": 0,
    "docs/agents.md": 0,
    "docs/api.md": 0,
    "docs/architecture.md": 0,
    "docs/benchmarks.md": 0,
    "docs/clients.md": 0,
    "docs/deployment.md": 0,
    "docs/evaluation.md": 0,
    "docs/methods.md": 0,
    "docs/models.md": 0,
    "docs/quality.md": 0,
    "docs/reliability.md": 0,
    "docs/troubleshooting.md": 0,
    "docs/tuning.md": 0,
}

# Persons for things, and private words for the field's: reported, preempted, also, memory, current.
AVOIDED = re.compile(
    r"\b(who|whom|whose|nobody|told|besides?|rooms?|sight|tends?|pulse|of now|(?:giv(?:e|es|ing|en)|gave) way)\b",
    re.IGNORECASE,
)

# First words that make a docstring a fragment.
FRAGMENTS = {"Of", "Who", "Whose", "What", "Those", "Whether", "So"}
FOLDERS = ("benchmarks", "carrel", "gateway", "gpu_worker", "kv_store", "tests", "tools")


def prose(text: str) -> str:
    """Return `text` without code, generated tables, targets of links and tags."""
    text = re.sub(r"^```.*?^```|<!-- table.*?<!-- end -->|^ {4,}\S*carrel .*?$", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", "X", text)
    return re.sub(r"<[^>]+>", "", re.sub(r"\]\([^)]*\)", "]", text))


def sentences(text: str) -> Iterator[str]:
    """Yield each sentence of `text` outside tables and headings; a colon or semicolon ends one too."""
    lines = ["" if line.startswith(("|", "#")) else line for line in text.splitlines()]
    for block in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", "\n".join(lines), flags=re.MULTILINE):
        yield from re.split(r"(?<=[.:;?!])\s+", " ".join(block.split()))


def num_words(sentence: str) -> int:
    return len(re.findall(r"\w[\w'|.,/-]*", sentence))


def first_words(file: Path) -> Iterator[str]:
    """Yield the first word of each docstring."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield re.split(r"\W", docstring, maxsplit=1)[0]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_of_a_page_are_short(page: str) -> None:
    found = [each for each in sentences(prose((ROOT / page).read_text())) if num_words(each) > MOST_WORDS]
    assert len(found) <= PAGES[page], "\n".join(found)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_uses_the_words_of_the_field(page: str) -> None:
    text = prose((ROOT / page).read_text())
    assert [text[max(0, word.start() - 40) : word.end() + 20] for word in AVOIDED.finditer(text)] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_begins_as_a_fragment(folder: str) -> None:
    found = {
        str(file.relative_to(ROOT)): words
        for file in sorted((ROOT / folder).rglob("*.py"))
        if (words := [word for word in first_words(file) if word in FRAGMENTS])
    }
    assert found == {}, "begin with a verb or a noun phrase"


def test_faults_are_found() -> None:
    text = prose(
        "`who` is told. See [it](a.md#who).\n\n```\nnobody\n```\n\n| a | whose |\n\n- One two: three.\n"
    )
    assert [word[0] for word in AVOIDED.finditer(text)] == ["told", "whose"]
    assert [each for each in sentences(text) if each] == ["X is told.", "See [it].", "One two:", "three."]
    assert num_words("A K|V row of 2,048 tokens isn't a-b.") == 8
