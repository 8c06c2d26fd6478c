"""Limits of memory, and fallbacks when it runs out."""
