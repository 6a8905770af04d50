"""CaM: evicted values are merged into kept ones."""
