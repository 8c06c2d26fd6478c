"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvengine")
except PackageNotFoundError:  # imported from a checkout
    __version__ = "0.2.0+unknown"
