"""Chelsea: similar tokens become their weighted mean."""
