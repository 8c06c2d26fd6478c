"""What a model takes and loses here: the bandwidth of memory, the time of a step, the quality of what is lossy."""
