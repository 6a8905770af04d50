"""Warm-up: work at the start for which first requests would wait otherwise."""
