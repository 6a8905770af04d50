"""Perplexity of books through decode steps, and how far a policy's predictions are from those of dense attention."""
