"""The tables of README.md and docs/, written from the committed results: `python -m benchmarks.pages [--check]`."""
