"""Prompts on their way through the layers, a chunk or all of a short one at a time, and what they hold meanwhile."""
