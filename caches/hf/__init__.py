"""Caches behind transformers' cache protocol."""
