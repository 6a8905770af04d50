"""Hit rates of hot caches: a model's selections on real text are recorded, and caches of every size simulated on
them."""
