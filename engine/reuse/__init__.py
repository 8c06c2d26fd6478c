"""Caches that outlive a call: conversations and prefixes."""
