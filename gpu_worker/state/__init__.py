"""The state of running sequences: requests, batches, slots."""
