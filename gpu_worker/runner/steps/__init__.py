"""Decode steps: run or captured, and how their tokens are drawn and emitted."""
