"""Calling a model: its inputs, masks, compiled steps, loading, devices."""
