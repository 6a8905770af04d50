"""Retain: what a policy keeps of the prompt, in slots."""
