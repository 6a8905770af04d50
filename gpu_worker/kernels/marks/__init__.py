"""Positions in order from two bits a position: the last launch of kernels that select without sorting."""
