"""An internal error on the command line: one line, or all of it for who asks."""

from __future__ import annotations

import pytest

import engine.generator
from engine.cli import main


@pytest.mark.parametrize("asked", ["", "option", "variable"])
def test_where_an_internal_error_comes_from_is_told_on_request(asked, monkeypatch, capsys):
    def broken(self, *given, **options):
        raise ZeroDivisionError("of a kind that is not expected")

    monkeypatch.setattr(engine.generator.Generator, "stream", broken)
    monkeypatch.setenv("KVENGINE_DEBUG", "1" if asked == "variable" else "0")
    with pytest.raises(SystemExit) as ended:
        main([*(["--traceback"] if asked == "option" else []), "generate", "x", "--max-new-tokens", "1"])
    told = capsys.readouterr().err
    assert ended.value.code == 1
    assert "error: ZeroDivisionError: of a kind that is not expected" in told
    assert ("in broken" in told) == bool(asked)
