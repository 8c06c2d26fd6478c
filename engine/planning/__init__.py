"""What a run will take, computed before anything runs."""
