"""What the engine does when memory runs out, or a limit is near."""
