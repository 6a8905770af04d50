"""Calls of tools: how a model's family writes them, the grammar that makes it, and reading them from an answer."""

from gateway.tool_calls.families import FAMILIES, CallFormat, family_of
from gateway.tool_calls.reader import CallsReader

__all__ = ["FAMILIES", "CallFormat", "CallsReader", "family_of"]
