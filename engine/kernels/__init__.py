"""Products and attention of this package's kernels on a CPU, and which of them is used."""
