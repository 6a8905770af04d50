"""ClusterKV: whole semantic clusters of keys are recalled."""
