"""Where the files that tests look at are."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
README = ROOT / "README.md"
ROOMS = ("configs", "caches", "strategies", "engine")
