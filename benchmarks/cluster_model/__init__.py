"""A model, not a measurement: a cluster of Carrel replicas, simulated from figures of one GPU."""
