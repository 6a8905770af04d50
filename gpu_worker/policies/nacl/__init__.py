"""NACL: proxy tokens and random eviction."""
