"""The server as a process under clients that mean no good, and with a full disk: see `hostile`."""

import json
import os
import subprocess
import sys
from contextlib import suppress

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

import httpx
from hostile import run, started

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")]
SPACE_MIB = 1500


def test_hostile_clients_cost_others_nothing():
    seen = run(prompts=3, half=200, header_mib=20, space_mib=SPACE_MIB, seconds=3)
    assert seen["lost"] == 0, seen
    assert seen["over_long"] == {"400": 3}, seen
    assert seen["latest_s"] < 3 * seen["alone_s"] + 2, seen
    assert abs(seen["grown"]) < 0.1, seen


def test_a_full_disk_under_the_prefix_store(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True)
    if not os.path.ismount(tmp_path):
        pytest.skip("no file system can be mounted here")
    try:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"prefix_store_bytes": 6_000_000, "prefix_store_folder": str(tmp_path)}))
        with started(["--config", str(config)]) as (url, process):
            with suppress(OSError), open(tmp_path / "others", "wb", buffering=0) as file:
                while file.write(bytes(2**16)) == 2**16:
                    pass

            def ask(first, prompts):
                """Long prompts, of which no two begin alike."""
                for number in range(first, first + prompts):
                    body = {"model": "shipped", "prompt": f"x{number} = [{'1, ' * 500}", "max_tokens": 3}
                    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                    assert answer.status_code == 200, answer.text

            def metric(name):
                lines = httpx.get(f"{url}/metrics").text.splitlines()
                return next(float(line.split()[-1]) for line in lines if line.startswith(f"kvengine_{name} "))

            ask(0, 8)
            assert metric("prefix_store_failures_total") > 0
            assert metric("prefix_store_bytes") <= 6_000_000
            assert not list(tmp_path.rglob("*.json"))[1:]
            os.unlink(tmp_path / "others")
            subprocess.run(["mount", "-o", "remount,size=200m", str(tmp_path)], check=True)
            ask(8, 4)
            assert list(tmp_path.rglob("*.safetensors"))
            assert httpx.get(f"{url}/health").status_code == 200
            assert process.is_running()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
