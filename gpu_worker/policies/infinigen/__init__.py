"""InfiniGen: a layer ahead, by a few skewed columns."""
