"""Scores the model on fresh documents by greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random

import torch

from carrel.evaluation import facts
from carrel.evaluation.documents import END, STYLES, Codec, DocumentError, Prompt, TokenizedBook, prompt
from carrel.evaluation.scoring import Rate, exact_match
from carrel.evaluation.words import Pools
from tools.train_nano.model import Llama
from tools.train_nano.quotes import quote_prompt

ANSWER_TOKENS = 48
TOKENS_PER_BATCH = 262_144
SUITES = ("one needle", "16 mixed", "16 numbers", "16 hex", "16 cellar", "16 neighbour", "4 chains", "quote")


@dataclass(frozen=True)
class Score:
    """Exact matches of one suite at one context length, with the 95 % interval of their share."""

    suite: str
    context: int
    num_correct: int
    n: int
    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, object]:
        """Its fields, for scores.json."""
        return asdict(self)


def draw_prompt(
    suite: str,
    codec: Codec,
    books: Sequence[TokenizedBook],
    words: Pools,
    context: int,
    rng: Random,
    style: str,
) -> Prompt:
    """A prompt of a suite that leaves `ANSWER_TOKENS` of `context` for the answer."""
    num_tokens = context - ANSWER_TOKENS
    book = rng.choice(books)
    if suite == "quote":
        while True:
            try:
                return quote_prompt(codec, book, num_tokens, rng, style)
            except DocumentError:
                book = rng.choice(books)
    kinds = {
        "one needle": ["number"],
        "16 numbers": ["number"] * 16,
        "16 hex": ["hex"] * 16,
        "16 cellar": ["cellar"] * 16,
        "16 neighbour": ["neighbour"] * 16,
        "4 chains": ["chain"] * 4,
    }
    drawn = facts.mixed(16, rng, words) if suite == "16 mixed" else facts.draw_set(kinds[suite], rng, words)
    return prompt(codec, book, drawn, rng.randrange(len(drawn)), num_tokens, rng, style)


@torch.inference_mode()
def answer(model: Llama, codec: Codec, prompts: Sequence[Prompt]) -> list[str]:
    """Greedy answers to prompts of about one length, up to the end token (of completions: the line's end)."""
    device = model.embed_tokens.weight.device
    lengths = torch.tensor([len(p.token_ids) for p in prompts], device=device)
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    for row, p in enumerate(prompts):
        ids[row, : lengths[row]] = torch.from_numpy(p.token_ids.astype("int64"))
    logits, cache = model.prefill(ids.to(device), lengths, ANSWER_TOKENS)
    new, ended = [], torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for _ in range(ANSWER_TOKENS):
        new.append(logits.argmax(-1))
        ended |= new[-1] == END
        if bool(ended.all()):
            break
        logits = model.decode(new[-1], cache)
    answers = []
    for p, row in zip(prompts, torch.stack(new, 1).tolist(), strict=True):
        text = codec.decode(row[: row.index(END)] if END in row else row)
        answers.append(text.split("\n")[0] if p.style == "completion" else text)
    return answers


def score(
    model: Llama,
    codec: Codec,
    books: Sequence[TokenizedBook],
    words: Pools,
    sizes: dict[int, int],
    seed: int,
    suites: Sequence[str] = SUITES,
) -> list[Score]:
    """Scores every suite at every context length of `sizes` (context: documents); styles take turns."""
    scores = []
    for context, n in sizes.items():
        right = dict.fromkeys(suites, 0)
        asked = []
        for suite in suites:
            rng = Random(f"{seed}:{suite}:{context}")
            asked += [
                (suite, draw_prompt(suite, codec, books, words, context, rng, STYLES[place % 2]))
                for place in range(n)
            ]
        size = max(1, TOKENS_PER_BATCH // context)
        for start in range(0, len(asked), size):
            part = asked[start : start + size]
            answers = answer(model, codec, [p for _, p in part])
            for (suite, p), text in zip(part, answers, strict=True):
                right[suite] += exact_match(text, p.answer)
        for suite, num_correct in right.items():
            rate = Rate(num_correct, n)
            scores.append(Score(suite, context, num_correct, n, rate.value, *rate.interval))
    return scores


def table(scores: Sequence[Score]) -> str:
    """The scores as a Markdown table, a row per context length."""
    suites = list(dict.fromkeys(s.suite for s in scores))
    cells = {(s.suite, s.context): s for s in scores}
    lines = ["| context | n | " + " | ".join(suites) + " |", "| --- | --- |" + " --- |" * len(suites)]
    for context in dict.fromkeys(s.context for s in scores):
        row = [cells[suite, context] for suite in suites]
        shown = (f"{s.value:.3f} ({s.low:.2f}-{s.high:.2f})" for s in row)
        lines.append(f"| {context // 1024}K | {row[0].n} | " + " | ".join(shown) + " |")
    return "\n".join(lines)
