"""Every kernel of the worker, measured against the bytes that it must move."""
