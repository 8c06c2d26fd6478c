"""One tensor of one layer."""
