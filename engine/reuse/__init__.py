"""Caches that outlive a call: conversations."""
