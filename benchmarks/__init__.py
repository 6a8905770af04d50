"""Measurements against other projects. Each is a module with a command line; results lie in `results/`."""
