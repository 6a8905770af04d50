"""Every row in the arena, an index, and the hot cache."""
