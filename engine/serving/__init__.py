"""Many requests at once: their steps are computed together, and each comes and goes by itself."""
