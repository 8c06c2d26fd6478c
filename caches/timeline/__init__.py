"""Which slots of a cache are in use. Integers only, no tensors."""
