"""What each layer of a model keeps, read from the model's configuration."""
