"""What is below: torch, transformers, accelerate, the machine and its compiler."""
