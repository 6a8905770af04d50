"""SparQ: the largest components of each query."""
