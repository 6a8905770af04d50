"""Device memory in pages: one pool of them, and addresses that they are put behind."""
