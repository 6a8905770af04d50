"""The methods: a folder each, and a line each in `registry`."""
