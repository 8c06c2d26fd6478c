"""The benchmarks run, in settings too small to tell anything but that what they print belongs together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(name, out, options):
    command = [sys.executable, ROOT / "benchmarks" / name, "--out", out, "--threads", "1", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(out.read_text())
    return found


def test_memory(tmp_path):
    found = run("memory.py", tmp_path / "memory.json", "--model tiny --contexts 256,320 --new 3 --window 64")
    assert [case["context"] for case in found["cases"]] == [256, 320]
    for case in found["cases"]:
        for name, row in case["rows"].items():
            assert row["same_text"] in (None, True)
            assert (row["same_text"] is None) == ("quan" in name or ("," in name and "disk" not in name))
            if name.startswith("transformers"):  # of which no room for more is kept
                assert row["bytes_per_token"] == pytest.approx(row["predicted_bytes_per_token"])
            else:
                assert row["bytes_per_token"] >= row["predicted_bytes_per_token"] - 1e-6
            assert 0 < row["ms"]["least"] <= row["ms"]["median"] <= row["ms"]["most"]
        assert case["rows"]["dynamic"]["times_peer"] > 0


def test_quality_and_its_plot(tmp_path):
    options = "--texts 2 --length 192 --windows 5 --window 32 --most-full 96"
    found = run("quality.py", tmp_path / "quality.json", options)
    exact = found["codecs"].pop("dynamic")["perplexity"]
    for name, taken in found["codecs"].items():
        # That one bit spoils the text shows that what is scored was read from the codec.
        assert taken["perplexity"] > 5 * exact if "1 bit" in name else taken["perplexity"] < 1.5 * exact
    stream = found["stream"]
    assert {len(per_window) for per_window in stream["perplexity"].values()} == {5, 3}
    for name, (least, most) in stream["least_and_most_bytes"].items():
        assert (least == most) == (name != "dynamic")
        assert name == "dynamic" or 0.5 < stream["to_inside_the_window"][name] < 2
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, ROOT / "benchmarks" / "plot.py", tmp_path / "quality.json"], check=True)
    assert "sha256" in (tmp_path / "quality.svg").read_text()
