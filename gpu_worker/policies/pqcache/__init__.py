"""PQCache: top-k by product-quantised keys."""
