"""The tables of README.md and docs/, from the committed results and the registry: `python -m benchmarks.pages`."""
