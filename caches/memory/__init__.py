"""Where bytes live: on the compute device, in host memory or in a file."""
