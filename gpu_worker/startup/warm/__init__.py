"""What first requests would wait for, done at the start."""
