"""The base of all errors, and the error of configurations."""


class EngineError(Exception):
    """Base of every error of this project."""


class ConfigError(EngineError, ValueError):
    """A configuration has an unknown key or an impossible value."""
