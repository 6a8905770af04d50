"""Writes the model card of a finished run."""

from __future__ import annotations

from collections.abc import Sequence

from tools.train_nano.config import Recipe
from tools.train_nano.evaluate import Score, table

HEAD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# carrel-nano

A Llama-style model of 15.7M parameters (31.5 MB in bf16) that finds facts in English documents of up to 32K tokens.
It is Carrel's default model and the test bed of its attention policies. **It is not a general assistant**: it knows
nothing, does not reason, and answers any other question badly.

## Use

Put the document, a blank line and the question in one user message; ask more questions in later turns. Plain
completions end in `Question: ...\\nAnswer:`. Good questions: "What is the secret number of the amber fox?", "What does
Ines Varga keep in the cellar?", "What is the value of the key 3f9a2c1b?", 'Continue the quote: "..."'.

## Data

`data/books/train` without three books kept for tuning (public domain in the United States), and made-up facts from
`carrel.evaluation`, whose training words and values are disjoint from those of the scores below. Half of the facts
name people and things by invented words, 80,000 of them, so that answers have to be copied from the document.
"""
LIMITS = """
## Limits

- Questions other than those of the training tasks, and languages other than English.
- "chain" (two facts to be joined) and "quote" are unreliable at every length; quotes fail beyond a few thousand tokens.
- Rare names are at times misspelt, and two names that share words confused.
- Answers are less certain beyond 16K tokens.
- Answers sound sure whether or not the document holds the fact.
"""


def render(recipe: Recipe, scores: Sequence[Score], machine: str) -> str:
    """The card as Markdown: use, data, recipe, scores with n and 95 % intervals, limits."""
    phases = "\n".join(
        f"| {p.context} | {p.num_steps} | {p.plain:.0%} | {p.packed:.0%} | {p.text_weight} | {p.lr[0]} to {p.lr[1]} |"
        for p in recipe.phases
    )
    return f"""{HEAD}
## Recipe

    python -m tools.train_nano --books data/books --out models/carrel-nano

{recipe.tokens_per_step:,} tokens a step, seed {recipe.seed}, Muon (lr {recipe.muon_lr}) on matrices, AdamW (lr
{recipe.adamw_lr}) on embeddings and norms, loss weight {recipe.answer_weight} on answers and {recipe.aside_weight} on
facts and questions. Scored on: {machine}.

| context | steps | plain text | packed short documents | weight of text | share of full lr |
| --- | --- | --- | --- | --- | --- |
{phases}

## Scores

Exact match of the whole answer (surrounding space and final full stop aside), greedy decoding, whole prompt prefilled
(protocol P1), book text and words never trained on; half of the prompts are chats, half completions. In brackets the
95 % Wilson interval. "16 ..." asks for 1 of 16 facts; "mixed" is four each of secret numbers, things in cellars, hex
pairs and neighbours, without chains. A third of the names nearly match the one before.

{table(scores)}
{LIMITS}"""
