"""Prompts on their way through the layers, and what they hold meanwhile."""
