"""A Ray Serve application: one gateway before many replicas, each with a store and a worker of its own."""
