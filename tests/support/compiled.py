"""Tiny models whose layers are compiled: all of a name share the packages, which are built once."""

from architectures import prompt

import engine

AUTO = engine.EngineConfig(compile="auto")
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def reference(model, inputs, **arguments):
    return model.generate(**inputs, **GREEDY | arguments)


def generator_of(model, rows=2):
    """A generator that has compiled layers for steps of so many rows."""
    generator = engine.Generator(model, config=AUTO)
    found = generator.warmup(prompt(rows), **GREEDY)
    assert found.endswith("layers"), found
    return generator
