"""What an answer must be: grammars, the tokens that they allow next, and the vocabulary that these are of."""

from gpu_worker.grammar.grammars import Grammars

__all__ = ["Grammars"]
