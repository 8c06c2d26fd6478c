"""What `quality.py` measures: variants of caches and weights, texts, facts, and the twin of a model."""
