"""Compiled decode steps: layers, and whole steps in one graph."""
