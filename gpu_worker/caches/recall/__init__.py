"""Recall: every row in the arena, an index, and the hot cache."""
