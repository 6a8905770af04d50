"""What a retain policy kept of the prompt, in slots."""
