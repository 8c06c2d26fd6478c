"""One cache made from another."""
