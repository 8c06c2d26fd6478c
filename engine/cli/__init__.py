"""The command line: `engine generate`, `engine caches` and `engine plan`. `main` is its entry point."""

from engine.cli.main import main

__all__ = ["main"]
