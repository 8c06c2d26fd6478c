"""The root of the engine's errors stands here because configurations raise them too and import nothing."""


class EngineError(Exception):
    """Base of every error of this project."""


class ConfigError(EngineError, ValueError):
    """A configuration with an unknown key or an impossible value."""
