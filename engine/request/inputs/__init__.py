"""What a model reads: checks of the prompt, sources, further inputs, guidance, and what is in a cache already."""
