"""StreamingLLM: sinks and a window."""
