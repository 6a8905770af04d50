"""How often a hot cache hits: what a model selects on real text, recorded, and caches of every size held against it."""
