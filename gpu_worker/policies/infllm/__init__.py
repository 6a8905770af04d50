"""InfLLM: blocks, looked up by their representatives."""
