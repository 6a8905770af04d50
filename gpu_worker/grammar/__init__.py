"""Constraints on an answer: grammars, the tokens that they allow next, and the vocabulary of these tokens."""

from gpu_worker.grammar.grammars import Grammars

__all__ = ["Grammars"]
