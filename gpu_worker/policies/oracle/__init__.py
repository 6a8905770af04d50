"""Oracle: exact scores, the upper bound of every recall policy."""
