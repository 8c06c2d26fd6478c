"""The version of what is installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvengine")
except PackageNotFoundError:  # a checkout on the path
    __version__ = "0.1.0+unknown"
