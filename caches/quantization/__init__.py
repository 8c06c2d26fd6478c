"""How blocks of keys and values are encoded in few bits, and attention over the codes."""
