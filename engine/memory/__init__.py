"""What a run takes, the cache of a call, limits of memory, and fallbacks when it runs out."""
