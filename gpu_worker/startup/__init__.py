"""Starts a worker: checks its options, plans its memory, and assembles engine and runner."""
