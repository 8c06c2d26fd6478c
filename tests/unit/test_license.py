"""The package says under which license it is, and has its text."""

import sys

from places import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_the_license_is_apache_2():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    texts = [(ROOT / file).read_text() for file in project["license-files"]]
    assert ["Apache License" in text and "Version 2.0, January 2004" in text for text in texts] == [True]
    assert "END OF TERMS AND CONDITIONS" in texts[0]
