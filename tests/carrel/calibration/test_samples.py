"""How texts become samples."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from carrel.calibration import LEAST_TOKENS, cut_samples
from carrel.process.options import OptionError
from carrel.texts import read_text

BEGIN = 7


class Characters:
    """A tokenizer with a token a character, and one that begins a text."""

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return (*([BEGIN] if add_special_tokens else []), *(ord(character) for character in text))


def write(folder: Path, name: str, first: int, count: int) -> Path:
    path = folder / name
    path.write_text("".join(chr(1000 + first + place) for place in range(count)), encoding="utf-8")
    return path


def cut(paths: list[Path], num_tokens: int, length: int) -> list[list[int]]:
    return cut_samples(paths, Characters(), num_tokens, length)  # type: ignore[arg-type]


def test_samples_are_spread_evenly_over_the_texts(tmp_path: Path) -> None:
    # five whole samples and a rest, then three
    paths = [write(tmp_path, "a", 0, 5 * 299 + 200), write(tmp_path, "b", 5000, 3 * 299)]
    every = cut(paths, 100_000, 300)
    starts = [*(1000 + 299 * place for place in range(5)), *(6000 + 299 * place for place in range(3))]
    assert [sample[:2] for sample in every] == [[BEGIN, start] for start in starts]
    assert all(sample[1:] == list(range(sample[1], sample[1] + 299)) for sample in every)
    # 1199 tokens are three samples; the middle one of each third of the eight
    assert cut(paths, 1199, 300) == [every[1], every[4], every[6]]
    assert cut(paths, 300, 300) == [every[4]]


def test_a_short_text_is_a_short_sample(tmp_path: Path) -> None:
    short, long = write(tmp_path, "short", 0, 260), write(tmp_path, "long", 5000, 800)
    assert [len(sample) for sample in cut([short, long], 4096, 400)] == [261, 400, 400]


def test_a_sample_is_no_longer_than_all_that_is_asked_for(tmp_path: Path) -> None:
    assert [len(sample) for sample in cut([write(tmp_path, "a", 0, 3000)], 256, 4096)] == [256]


def test_a_text_of_a_few_words_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a", 0, LEAST_TOKENS - 2)
    with pytest.raises(OptionError, match=f"{path} has 254 tokens; give at least 256"):
        cut([path], 4096, 512)
    assert len(cut([write(tmp_path, "a", 0, LEAST_TOKENS - 1)], 4096, 512)) == 1


def test_packed_and_marked_texts(tmp_path: Path) -> None:
    packed = tmp_path / "a.txt.xz"
    packed.write_bytes(lzma.compress("Äpfel".encode()))
    marked = tmp_path / "b.txt"
    marked.write_bytes("Äpfel".encode("utf-8-sig"))
    assert (read_text(packed), read_text(marked)) == ("Äpfel", "Äpfel")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, "cannot read .*: No such file"),
        ("a.txt", b"", "is empty"),
        ("a.txt", b" \n\n ", "is empty"),
        ("a.txt", b"abc\xff", r"not UTF-8 text \(byte 3\)"),
        ("a.txt.xz", b"plain", "no xz file"),
        ("a.txt.xz", lzma.compress(b"x" * 5000)[:-9], "no xz file, or a damaged one"),
    ],
)
def test_what_is_no_text_is_refused(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=message) as refused:
        read_text(path)
    assert str(path) in str(refused.value)
