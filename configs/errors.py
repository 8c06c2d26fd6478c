"""The base of all errors, that of configurations, and two of caches, which are raised without torch too."""


class EngineError(Exception):
    """Base of every error of this project."""


class ConfigError(EngineError, ValueError):
    """A configuration has an unknown key or an impossible value."""


class CacheError(EngineError):
    """Base of every error a cache raises."""


class CacheFileError(CacheError, ValueError):
    """A file holds no cache, is damaged, or was saved with another model. The message says what differs."""
