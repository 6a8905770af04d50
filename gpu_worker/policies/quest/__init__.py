"""Quest: pages, by bounds of their keys."""
