"""Where a model comes from: a folder, a hub id, a GGUF file, an adapter."""
