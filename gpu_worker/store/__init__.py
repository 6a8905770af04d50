"""The worker's side of the KV store: rows to the arena and back."""
