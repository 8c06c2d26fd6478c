"""The benchmarks run, in settings too small to tell anything but that what they print belongs together."""

import json
import subprocess
import sys

import pytest
from helpers import needs_kernels
from places import ROOT


def run(name, out, options):
    options = options.split() if isinstance(options, str) else options
    threads = [] if name == "planned.py" else ["--threads", "1"]  # it copies processes, which have one
    command = [sys.executable, ROOT / "benchmarks" / name, "--out", out, *threads, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_memory(tmp_path):
    found = run("memory.py", tmp_path / "memory.json", "--model tiny --contexts 256 --new 3 --window 64")
    assert [case["context"] for case in found["cases"]] == [256]
    compiled = [name for name in found["left_out"] if "fused" in name]
    assert found["left_out"] == compiled, "for which a compiler may be missing"
    for case in found["cases"]:
        for name, row in case["rows"].items():
            assert row["same_text"] in (None, True)
            assert (row["same_text"] is None) == any(lossy in name for lossy in ("quan", "hqq", "window"))
            if name.startswith("transformers"):  # of which no room for more is kept
                assert row["bytes_per_token"] == pytest.approx(row["predicted_bytes_per_token"])
            else:
                assert row["bytes_per_token"] >= row["predicted_bytes_per_token"] - 1e-6
            assert 0 < row["ms"]["least"] <= row["ms"]["median"] <= row["ms"]["most"]
        assert case["rows"]["dynamic"]["times_peer"] > 0


@pytest.mark.slow
def test_plans_beside_peaks(tmp_path):
    found = run("planned.py", tmp_path / "planned.json", "--seed 0 --seed 5")
    assert [case["seed"] for case in found["cases"]] == [0, 5]
    for case in found["cases"]:
        planned, measured = (case["run"][name] + case["weights"][name] for name in ("planned", "measured"))
        assert planned == pytest.approx(measured, rel=0.15)
        assert 0 < case["cache"]["at_the_end"] <= case["cache"]["planned"]


@pytest.mark.slow
@needs_kernels
def test_products(tmp_path):
    found = run("products.py", tmp_path / "products.json", "--outs 64 --width 32 --runs 1")
    assert set(found["ms"]) == {"float32", "bfloat16", "float16"}
    for by_rows in found["ms"].values():
        for by_name in by_rows.values():
            assert all(0 < taken["least"] <= taken["median"] <= taken["most"] for taken in by_name.values())


@pytest.mark.slow
def test_many_prompts(tmp_path):
    options = ["--model", "tiny", "--count", "12", "--slots", "3,8", "--only",
               "3 slots; 8 slots; transformers, one padded batch; transformers, one by one"]  # fmt: skip
    found = run("many.py", tmp_path / "many.json", options)
    assert {case["same_texts"] for case in found["cases"].values()} == {12}
    for slots in ("3 slots", "8 slots"):
        assert found["cases"][slots]["row_steps"] == pytest.approx(1)
        assert found["cases"][slots]["slots_read"] == pytest.approx(1)
    assert found["latency"]["16"]["pieces"] <= 2


@pytest.mark.slow
def test_servers(tmp_path):
    options = ["--model", "tiny", "--clients", "3", "--each", "2", "--only", "kvengine; transformers"]
    found = run("serve.py", tmp_path / "serve.json", options)["cases"]["3"]
    assert found["requests"] == 6
    for server in found["servers"].values():
        assert server["same_texts"] == 6
        assert server["tokens"] == server["tokens_asked"]
        assert 0 < server["first_s"]["median"] <= server["first_s"]["p95"] <= server["first_s"]["most"] <= server["s"]


@pytest.mark.slow
def test_quality_and_its_plot(tmp_path):
    options = ["--texts", "2", "--length", "192", "--facts", "500", "--twin", "--caches",
               "dynamic; kivi, 4 bits; hqq, 1 bit, per token; sliding_window, 1/4"]  # fmt: skip
    out = tmp_path / "quality.json"
    found = run("quality.py", out, options)
    names = "dynamic", "kivi, 4 bits", "hqq, 1 bit, per token", "sliding_window, 1/4"
    exact, coarse, spoiled, window = map(found["caches"].get, names)
    assert (exact["bits"], exact["kl"], exact["same_top"]) == (32, pytest.approx(0, abs=1e-6), 1)
    # That one bit spoils the text shows that what is scored was read from the codec.
    assert 1e-4 < coarse["kl"] < 0.1 < window["kl"] < 1 < spoiled["kl"]
    assert 8 <= window["bits"] < 11  # a quarter of 32, and what is read at a time
    assert all(0 <= row["facts"]["500"] <= found["facts"] for row in found["caches"].values())
    for weights in (found["weights"]["model"], found["weights"]["twin"]):
        assert weights["full"]["kl"] < 1e-6 < weights["int8"]["kl"] < weights["int4"]["kl"] < 1
        assert weights["full"]["bits"] > 31 > 9 > weights["int8"]["bits"] > weights["int4"]["bits"]
        assert len(weights["full"]["answers"]) == len(found["questions"])
    # A later run adds to the file.
    options = "--texts 2 --length 192 --caches fp8 --weights full --windows 5 --window 32 --most-full 96"
    later = run("quality.py", out, options)
    assert later["caches"].items() > found["caches"].items()
    assert later["weights"]["twin"] == found["weights"]["twin"]
    stream = later["stream"]
    assert {len(per_window) for per_window in stream["perplexity"].values()} == {5, 3}
    for name, (least, most) in stream["least_and_most_bytes"].items():
        assert (least == most) == (name != "dynamic")
        assert name == "dynamic" or 0.5 < stream["to_inside_the_window"][name] < 2
    assert "fp8" in out.with_suffix(".md").read_text()
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, ROOT / "benchmarks" / "plot.py", out], check=True)
    assert "sha256" in out.with_suffix(".svg").read_text()


@pytest.mark.slow
def test_decode_and_its_plot(tmp_path):
    found = run("decode.py", tmp_path / "decode.json", "--model tiny --runs 1 --no-compiled")
    assert [case["prompt_tokens"] for case in found["cases"]] == [64, 4096]
    for case in found["cases"]:
        assert all(case["same_text"].values())
        assert {"transformers dynamic", "transformers static", "dynamic", "static"} <= set(case["engines_ms"])
        assert all(0 < taken["least"] <= taken["most"] for taken in case["engines_ms"].values())
        assert all(ms > 0 for ms in case["step_ms"].values())
    assert all(taken["least"] > 0 for taken in found["loop_overhead_ms"].values())
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, ROOT / "benchmarks" / "plot.py", tmp_path / "decode.json"], check=True)
    assert "sha256" in (tmp_path / "decode.svg").read_text()


@pytest.mark.slow
def test_decode_in_half_precision(tmp_path):
    found = run(
        "decode.py", tmp_path / "decode.json", "--model tiny --dtype bfloat16 --prompts 16,32 --runs 1 --no-compiled"
    )
    assert found["dtype"] == "bfloat16"
    for case in found["cases"]:
        assert case["engines_ms"].keys() == case["first_token_ms"].keys()
        assert all(taken["least"] > 0 for taken in case["first_token_ms"].values())
        assert not any("weights" in name for name in case["engines_ms"])


@pytest.mark.slow
def test_branching_and_its_plot(tmp_path):
    found = run("branching.py", tmp_path / "branching.json", "--model tiny --quick --runs 1 --no-compiled")
    assert list(found["curve"]) == ["1", "2", "4", "8", "16", "32", "64"]
    cases = found["cases"] | found["curve"]
    for case in cases.values():
        ours = case["engines"]["ours"]
        assert 0 < ours["whole_s"]["least"] <= ours["whole_s"]["median"] <= ours["whole_s"]["most"]
        assert ours["cache_bytes"] > 0
        assert case["same_text"] is (True if "transformers" in case["engines"] else None)
        assert (case["times_peer"] is None) == (len(case["engines"]) == 1)
    assert found["cases"]["16 beams"]["engines"]["transformers"]["cache_bytes"] == 16 * (50 + 4) * 2 * 2 * 64 * 4
    assert {row["peak_bytes"] > 0 for row in found["cases"]["40 beams, 20 texts"]["engines"].values()} == {True}
    assert "greedy" in found["cases"]["contrastive, 8 candidates"]["engines"]
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, ROOT / "benchmarks" / "plot.py", tmp_path / "branching.json"], check=True)
    assert "sha256" in (tmp_path / "branching.svg").read_text()


@pytest.mark.slow
def test_single_scenarios_of_branching(tmp_path):
    options = ["--model", "tiny", "--quick", "--runs", "1", "--no-curve", "--no-peak", "--scenarios"]
    found = run("branching.py", tmp_path / "branching.json", [*options, "16 samples; 16 beams"])
    assert list(found["cases"]) == ["16 beams", "16 samples"]
    assert found["curve"] == {}
    for case in found["cases"].values():
        assert case["same_text"]
        assert list(case["engines"]) == ["ours", "ours, compiled", "transformers"]
        assert case["times_peer_compiled"] > 0


@pytest.mark.slow
def test_assisted(tmp_path):
    found = run("assisted.py", tmp_path / "assisted.json", "--model tiny --lower 1 --quick --runs 1")
    cases = found["cases"]
    for case in cases.values():
        assert case["same_text"] is True
        assert len(case["engines"]) == 4 - (case["rows"] > 1)
        assert set(case["times"]) == set(case["engines"]) - {"proposed"}
        assert 0 < case["floors_ms"]["with proposals"] < case["floors_ms"]["alone"]
    accepted = [case["acceptance"] for case in cases.values() if not case["lookup"] and case["rows"] == 1]
    assert accepted == sorted(accepted, reverse=True)
    assert (accepted[0], accepted[-1] < 0.5) == (1, True)
    assert cases["lookup in a text that repeats itself"]["acceptance"] > 0.5


@pytest.mark.slow
def test_startup(tmp_path):
    found = run("startup.py", tmp_path / "startup.json", "--runs 1")
    assert found["same_text"] is True
    cases = found["cases"]
    own = ["command line", "command line, first on a machine", "script"]
    assert list(cases) == ["import torch", *own, "transformers"]
    for case in cases.values():
        assert 0 < case["text_processor_s"]["median"] < case["processor_s"]["median"]
        assert case["text_s"]["median"] > 0
    assert cases["transformers"]["times_peer"] == 1


@pytest.mark.product
def test_weights(tmp_path):
    found = run("weights.py", tmp_path / "weights.json", "--model tiny --runs 1")
    ours = {"transformers", "float32", "int8 weights", "int4 weights"}
    assert all(ours <= taken.keys() for taken in found["prompts_ms"].values())
    assert all(ours == taken.keys() for taken in found["steps_ms"].values())
    assert (list(found["prompts_ms"]), list(found["steps_ms"])) == (["16", "100", "1000"], ["1", "4", "16", "40"])
    taken = [one for part in ("prompts_ms", "steps_ms") for case in found[part].values() for one in case.values()]
    assert min(one["median"] for one in taken) > 0


@pytest.mark.product
def test_compiling(tmp_path):
    found = run("compiling.py", tmp_path / "compiling.json", "--model tiny --runs 1 --calls 10")
    assert len(found["package_bytes"]) >= 2, "one for a row, one for two to four, ..."
    assert min(one["with"]["median"] for one in found["steps_ms"].values()) > 0
    assert found["other_weights_loaded"] is True
    assert found["mixed"]["builds_started"] == found["mixed"]["packages_built"] == 0
    assert sum(found["mixed"]["by"].values()) == 10
    assert any(name.endswith(": compiled") for name in found["mixed"]["by"])
    assert min(found["built"]["ready_s"], *found["waited_s"].values()) > 1


@pytest.mark.slow
def test_reuse(tmp_path):
    cases = run("reuse.py", tmp_path / "reuse.json", "--shape tiny --runs 1")["cases"]
    assert len(cases) == 8
    for case in cases.values():
        assert case.get("same_text", True) is True
        assert case["times"] == pytest.approx(case["peer_s"]["median"] / case["ours_s"]["median"])
    [second] = [case for name, case in cases.items() if "second prompt" in name]
    assert second["bytes_copied"] == 0
