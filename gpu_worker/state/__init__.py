"""What the engine knows of running sequences: requests, batches, slots."""
