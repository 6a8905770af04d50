"""Load on a running server over OpenAI's HTTP API."""
