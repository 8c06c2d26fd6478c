"""Tables of the documentation, made from the files in benchmarks/results."""

from __future__ import annotations

import textwrap
from typing import Any

Report = dict[str, Any]
_SHORT = {  # rows of the README's table, by the name in the results
    "transformers dynamic": "transformers, `DynamicCache`",
    "dynamic, torch's linears": "kvengine `dynamic`, linear layers as torch computes them",
    "dynamic": "kvengine `dynamic`",
    "static, compiled": 'kvengine `static`, `compile="auto"`',
    "llama.cpp, float32": "llama.cpp, float32",
    "int8 weights": 'kvengine `static`, `compile="auto"`, `weights="int8"`',
    "llama.cpp, Q8_0": "llama.cpp, Q8_0",
    "int4 weights": 'kvengine `static`, `compile="auto"`, `weights="int4"`',
    "llama.cpp, Q4_0": "llama.cpp, Q4_0",
}


_BOUND = "lower bound: reading weights and cache once at the measured bandwidth"


def machine(report: Report) -> str:
    return (
        f"{report['processor']}, {report['threads']} threads, torch {report['torch']}, transformers "
        f"{report['transformers']}"
    )


def spread(taken: dict[str, float], digits: int = 1) -> str:
    """Median, least and most. A time is a difference of two calls: a least one below zero is their noise, left out."""
    most = f"{taken['most']:.{digits}f}"
    least = f"{taken['least']:.{digits}f} to {most}" if taken["least"] > 0 else f"up to {most}"
    return f"{taken['median']:.{digits}f} ({least})"


def table(head: list[str], rows: list[list[str]], align: str = "") -> list[str]:
    """align: one of l, c, r per column; left where it says nothing."""
    marks = {"l": "---", "c": ":-:", "r": "--:"}
    under = [marks[letter] for letter in align.ljust(len(head), "l")]
    return ["| " + " | ".join(cells) + " |" for cells in [head, under, *rows]]


def text(*parts: str | list[str]) -> str:
    """Paragraphs and tables, with an empty line between them."""
    return "\n\n".join(part if isinstance(part, str) else "\n".join(part) for part in parts) + "\n"


def short_speed(reports: list[Report]) -> str:
    """Of the README: a few rows of `speed`, the medians alone, of all processors."""
    cases = [case for report in reports for case in report["cases"]]
    rows = [[_BOUND, *(f"{case['floor_ms']:.1f}" for case in cases)]]
    for name, title in _SHORT.items():
        taken = [case["engines_ms"].get(name) for case in cases]
        rows.append([title, *("" if one is None else f"{one['median']:.1f}" for one in taken)])
    head = [f"{report['processor']}, {case['prompt_tokens']}" for report in reports for case in report["cases"]]
    machines = "; ".join(f"{machine(report)}, {report['bandwidth_gb_per_s']:.0f} GB/s" for report in reports)
    return text(
        table(["ms per token, by processor and prompt length", *head], rows, "l" + "r" * len(head)), f"{machines}."
    )


def _times(cases: list[Report], name: str) -> list[str]:
    return [spread(case["engines_ms"][name]) if name in case["engines_ms"] else "" for case in cases]


def speed(report: Report) -> str:
    cases = report["cases"]
    assert all(same for case in cases for same in case["same_text"].values())
    head = ["", *(f"prompt {case['prompt_tokens']}" for case in cases)]
    engines = [[_BOUND, *(f"{case['floor_ms']:.1f}" for case in cases)]]
    engines += [[name, *_times(cases, name)] for name in cases[0]["engines_ms"]]
    parts = [[name, *(f"{case['step_ms'][name]:.2f}" for case in cases)] for name in cases[0]["step_ms"]]
    overhead = ", ".join(f"{name} {taken['median']:.2f} ms" for name, taken in report["loop_overhead_ms"].items())
    return text(
        f"{machine(report)}, {report['bandwidth_gb_per_s']:.0f} GB/s; ms per token, median (least to most).",
        table(head, engines),
        "Where a step of `dynamic` spends its time, in ms:",
        table(head, parts),
        f"The loop itself, everything outside `model(...)`, on a model of 4 layers, 256 wide: {overhead} per token.",
    )


def half_precision(report: Report) -> str:
    """A step after prompts of these lengths, and the time to their first tokens."""
    model = report["model"] if isinstance(report["model"], str) else "a Llama of 100 M with random weights"
    cases = report["cases"]
    head = ["", *(f"{what}, prompt {case['prompt_tokens']}" for case in cases for what in ("step", "first token"))]
    rows = [[_BOUND, *(cell for case in cases for cell in (f"{case['floor_ms']:.1f}", ""))]]
    for name in cases[0]["engines_ms"]:
        times = [(case["engines_ms"].get(name), case["first_token_ms"].get(name)) for case in cases]
        rows.append([name, *("" if taken is None else spread(taken, digits=1 - number) for both in times
                             for number, taken in enumerate(both))])  # fmt: skip
    return text(
        f"**{report['dtype']}**, {model}; {machine(report)}, {report['bandwidth_gb_per_s']:.0f} GB/s; ms, median "
        "(least to most).",
        table(head, rows, "l" + "r" * (len(head) - 1)),
    )


def scaling(report: Report) -> str:
    parts: list[str | list[str]] = [f"{machine(report)}; ms per step, median of a few runs, and MB of the cache."]
    for name, curve in report["curves"].items():
        engines = list(curve["exponents"])
        rows = [[size, *(_point(point.get(one)) for one in engines)] for size, point in curve["points"].items()]
        exponents = [f"{fit['ms']:.2f}; {fit['bytes']:.2f}" for fit in curve["exponents"].values()]
        parts.append(table([name, *engines], [*rows, ["exponents", *exponents]], "r" * (1 + len(engines))))
    return text(*parts)


def _point(point: Report | None) -> str:
    return "" if point is None else f"{point['ms']['median']:.1f}; {point['bytes'] / 1e6:,.1f} MB"


def memory(report: Report) -> str:
    cases = report["cases"]
    assert not report["left_out"]
    assert all(row["same_text"] is not False for case in cases for row in case["rows"].values())
    longest, sizes = cases[-1], []
    head = ["cache", "by arithmetic", "measured", "of full keys and values", "with scratch", "peak of the process, MB"]
    for name, row in longest["rows"].items():
        counted = [f"{row[part]:,.0f}" for part in ("predicted_bytes_per_token", "bytes_per_token")]
        shares = [f"{row[part]:.1%}" for part in ("of_full", "of_full_with_scratch")]
        sizes.append([name, *counted, *shares, "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}"])
    contexts = [name for case in cases for name in (str(case["context"]), "x")]
    times = [[_BOUND.replace("cache", "full cache")]]
    for case in cases:
        times[0] += [f"{case['floor_ms']:.1f}", ""]
    for name in longest["rows"]:
        times.append([name])
        for row in (case["rows"][name] for case in cases):
            times[-1] += [spread(row["ms"]), "" if row["times_peer"] is None else f"{row['times_peer']:.2f}"]
    return text(
        f"{machine(report)}; {longest['context']} tokens. Bytes per token count what the cache keeps, by arithmetic "
        "and as measured with room for more.",
        table(head, sizes, "lrrrrr"),
        f"ms per token, median (least to most) of {report['new_tokens']} steps; x is how many times faster than "
        "transformers' cache of the same kind and library.",
        table(["context", *contexts], times, "l" + "lr" * len(cases)),
    )


def branching(report: Report) -> str:
    assert not report["quick"]
    assert all(case["same_text"] for name, case in report["cases"].items() if "beams" in name)
    rows = []
    for name, case in report["cases"].items():
        [peer] = [other for other in case["engines"] if not other.startswith("ours")] or [None]
        theirs = ["nothing to compare with", "-", "-", "-"]
        if peer is not None:
            theirs = [peer, *_branching_cells(case["engines"][peer])]
        for engine, times, title in (
            ("ours", case["times_peer"], name),
            ("ours, compiled", case.get("times_peer_compiled"), f"{name}, compiled layers"),
        ):
            if engine in case["engines"]:
                ours, shown = _branching_cells(case["engines"][engine]), "-" if times is None else f"{times:.2f}"
                rows.append([title, f"{case['prompt']} + {case['new']}", ours[0], shown, *ours[1:], *theirs])
    head = ["", "prompt + new", "kvengine", "x", "cache MB", "peak MB", "peer", "seconds", "cache MB", "peak MB"]
    return text(
        f"{machine(report)}, {report['bandwidth_gb_per_s']:.0f} GB/s; seconds of a whole call, median (least to most) "
        f"of {report['runs']}, prompt included; x is how many times faster than the peer; peaks were measured where a "
        "number stands.",
        table(head, rows, "lllrrrllrr"),
    )


def _branching_cells(row: Report) -> list[str]:
    peak = f"{row['peak_bytes'] / 1e6:,.0f}" if "peak_bytes" in row else "-"
    return [spread(row["whole_s"], 2), f"{row['cache_bytes'] / 1e6:,.0f}", peak]


def assisted(report: Report) -> str:
    engines = ("proposed", "greedy", "transformers, greedy", "transformers, proposed")
    rows = []
    for name, case in report["cases"].items():
        assert case["same_text"]
        shown = [f"{case['prompt']} + {case['new']}", f"{case['acceptance']:.0%}"]
        shown.append(f"{case['tokens_per_verification']:.2f}")
        times = [case["engines"].get(engine_name) for engine_name in engines]
        rows.append([name, *shown, *("-" if row is None else spread(row["whole_s"], 2) for row in times)])
    return text(
        f"{machine(report)}; seconds of a whole call, median (least to most) of {report['runs']}, prompt included.",
        table(["", "prompt + new", "accepted", "tokens per forward", *engines], rows, "llrr"),
    )


def out_of_memory(report: Report) -> str:
    rows = []
    for name, case in report["cases"].items():
        ours = case["engines"]["ours"]
        fallbacks = [taken["name"] for taken in ours["fallbacks"]]
        assert ours["same_text"] or "quantize" in fallbacks
        runs = [
            "out of memory" if run["error"] else f"{run['seconds']:.1f} s{'' if run['same_text'] else ', another text'}"
            for run in case["engines"].values()
        ]
        shape = [f"{case['rows']} x {case['prompt']} + {case['new']}", f"{case['more_mb']} MB"]
        rows.append([name, *shape, f"{case['unlimited_s']:.1f} s", *runs, ", ".join(fallbacks) or "none needed"])
    head = ["", "rows x prompt + new", "memory beyond the model", "with all memory", "transformers", "kvengine"]
    first = next(iter(report["cases"].values()))
    log = "\n".join(textwrap.fill(line, 110, subsequent_indent="    ") for line in first["engines"]["ours"]["log"])
    return text(
        f"{machine(report)}; seconds of a whole call.",
        table([*head, "fallbacks"], rows, "lllrlll"),
        "The log of the first row:",
        f"```text\n{log}\n```",
    )


def reuse(report: Report) -> str:
    rows, notes = [], []
    for name, case in report["cases"].items():
        assert case.get("same_text", True)
        assert case.get("bytes_copied", 0) == 0
        if size := case.get("file_over_cache"):
            notes.append(f"The file has {size:.3f} times the bytes of the cache's keys and values.")
        rows.append([name, spread(case["ours_s"], 3), spread(case["peer_s"], 3), f"{case['times']:.2f}"])
    return text(
        f"{machine(report)}; seconds, median (least to most) of {report['runs']} and of four times as many in the last "
        "row; x is the speedup, the seconds of what it is compared with over ours. The texts are the same.",
        table(["", "ours", "compared with", "x"], rows, "lrrr"),
        *notes,
    )


def structured(report: Report) -> str:
    head = ["tokens of the vocabulary", *report["cases"][0]["ms_per_token"]]
    rows = []
    for case in report["cases"]:
        assert case["ended"] == "eos"
        rows.append([f"{case['vocabulary']:,}", *map(spread, case["ms_per_token"].values())])
    first = report["cases"][0]
    return text(
        f"{machine(report)}; ms per token, median (least to most). With a vocabulary of {first['vocabulary']:,} tokens "
        f'{first["certain_tokens_of_keys"]} of the {first["new_tokens"]["keys"]} tokens of "keys" are certain.',
        table(head, rows, "rrrr"),
    )


def startup(report: Report) -> str:
    assert report["same_text"]
    rows = [
        [name, spread(case["text_s"]), spread(case["processor_s"]), f"{case['times_peer']:.2f}"]
        for name, case in report["cases"].items()
        if "other checkout" not in name
    ]
    return text(
        f"{machine(report)}; seconds from the start of a process until its text of {report['new_tokens']} tokens is "
        f"there, median (least to most) of {report['runs']}; x is the time relative to the script of transformers.",
        table(["", "until the text", "processor time until the end", "x"], rows, "lrrr"),
    )


def weights(report: Report) -> str:
    parts = {"prompts_ms": "ms to the first token of a prompt of", "steps_ms": "ms per step after 64 tokens, beams"}
    tables = []
    for part, title in parts.items():
        cases = report[part]
        names = next(iter(cases.values()))
        rows = [[name, *(spread(taken[name]) for taken in cases.values())] for name in names]
        tables.append(table([title, *cases], rows, "l" + "r" * len(cases)))
    units = "with matrix units (AMX)" if report["matrix_units"] else "without matrix units"
    return text(f'{machine(report)}; {units}; the model "small"; median (least to most).', *tables)


def compiling(report: Report) -> str:
    mixed, ms = report["mixed"], report["built"]["ms_per_token"]
    assert report["other_weights_loaded"]
    assert mixed["builds_started"] == mixed["packages_built"] == 0
    compiled = sum(count for name, count in mixed["by"].items() if name.endswith("compiled"))
    first = {name: spread(seconds, 3) for name, seconds in report["first_call_s"].items()}
    rows = [
        ["kernels and matrix products, once per machine, s", f"{report['fresh']['generator_s']:.1f}"],
        *([f"layers of {rows} row{'s' * (rows != '1')}, waited for, s", f"{seconds:.1f}"]
          for rows, seconds in sorted(report["waited_s"].items())),
        ["layers, while calls go on without end, s", f"{report['built']['ready_s']:.1f}"],
        ["ms per token of these calls", spread(ms["meanwhile"])],
        ["ms per token without compiled layers", spread(ms["without"])],
        ["ms per token with them", spread(ms["with"])],
        ["first call of another process, other weights, without them, s", first["off"]],
        ["first call of another process, other weights, with them, s", first["auto"]],
        [f"of {mixed['calls']} mixed calls: computed with them", str(compiled)],
        [f"of {mixed['calls']} mixed calls: that compiled anything", str(mixed["builds_started"])],
        ["a package, MB", f"{max(report['package_bytes']) / 1e6:.1f}"],
    ]  # fmt: skip
    steps = [
        [name, spread(found["without"]), spread(found["with"]),
         f"{found['without']['median'] / found['with']['median']:.2f}"]
        for name, found in report.get("steps_ms", {}).items()
    ]  # fmt: skip
    head = ["ms per step after 64 tokens", "without", "with compiled layers", "x"]
    cache = "" if steps else ", cache `static`"
    return text(
        f'{machine(report)}; the model "small"{cache}; ms per token with the prompt of 64 tokens; median (least to '
        "most).",
        *([table(head, steps, "lrrr")] if steps else []),
        table(["", ""], rows, "lr"),
    )


def many(report: Report) -> str:
    cases = report["cases"]
    ours = max(case["tokens_per_s"] for name, case in cases.items() if name.endswith(" slots"))
    rows, waits = [], []
    for name, case in cases.items():
        # Sums in another order: a near tie between two tokens may end in the other one.
        assert case["same_texts"] >= 0.95 * report["prompts"]
        counted = [f"{case[part]:.2f}" if part in case else "" for part in ("row_steps", "slots_read")]
        times = "" if "row_steps" in case else f"{ours / case['tokens_per_s']:.2f}"
        rows.append([name, f"{case['s']:.1f}", f"{case['tokens_per_s']:.1f}", times, *counted])
    for tokens, wait in report["latency"].items():
        waits.append([
            tokens, f"{1000 * wait['first_token_s']:.0f}", str(wait["pieces"]),
            f"{1000 * wait['between_tokens_s']:.0f}", f"{1000 * wait['between_tokens_meanwhile_s']:.0f}",
        ])  # fmt: skip
    return text(
        f"{machine(report)}; {report['prompts']} prompts of together {report['prompt_tokens']:,} tokens, "
        f"{report['new_tokens']:,} new tokens; x is the speedup, their seconds over ours (the best number of "
        "slots); row-steps (rows computed in all decode steps) and slots read (cache entries read by attention), over "
        "the least possible.",
        table(["", "s", "tokens per s", "x", "row-steps", "slots read"], rows, "lrrrrr"),
        "A prompt arrives while eight others decode; ms:",
        table(["tokens of the prompt", "first token", "chunks", "between tokens of the others", "meanwhile"], waits,
              "rrrrr"),
    )  # fmt: skip


def serve(report: Report) -> str:
    rows = []
    for clients, case in report["cases"].items():
        for name, found in case["servers"].items():
            # As above: a near tie may end in the other token, and the rest of that text differs.
            assert found["tokens"] == found["tokens_asked"]
            assert found["same_texts"] >= 0.9 * case["requests"]
            first = found["first_s"]
            rows.append([clients, name, f"{found['s']:.1f}", f"{found['tokens_per_s']:.1f}", f"{first['median']:.2f}",
                         f"{first['p95']:.2f}"])  # fmt: skip
    counts = " and ".join(str(case["requests"]) for case in report["cases"].values())
    return text(
        f"{machine(report)}, shared by server and clients; {counts} requests.",
        table(["clients", "server", "s", "tokens per s", "first token, s", "p95"], rows, "rlrrrr"),
    )


def ray(report: Report) -> str:
    assert report["same_texts"] == report["rows"]
    rows = [[count, f"{case['rows_per_s']:.2f}"] for count, case in report["cases"].items()]
    return text(
        f"{machine(report)}; actors of one thread each, {report['rows']} rows of {report['new_tokens']} new tokens, "
        f"the same texts; {report['times']:.2f} times as many rows per second with two.",
        table(["actors", "rows per s"], rows, "rr"),
    )


def tensor_parallel(report: Report) -> str:
    assert report["same_texts"]
    rows = []
    for name, case in report["cases"].items():
        sizes = [f"{case['weight_bytes'] / 1e6:.0f} MB", f"{case['cache_bytes'] / 1e6:.2f} MB"]
        operations = [f"{case['operations'][kind]:.0f}" for kind in ("of tensors", "of the engine")]
        rows.append([name, f"{case['ms']['median']:.1f}", *sizes, *operations])
    return text(
        f'{machine(report)}; model "{report["model"]}" (12 layers), float32, {report["new_tokens"]} new tokens, '
        "medians of 5; the same texts.",
        table(["", "ms per token", "weights", "cache", "operations", "exchanges"], rows, "lrrrrr"),
    )


TABLES = {
    "tensor_parallel": ("tensor-parallel-cpu", tensor_parallel),
    "ray": ("ray-cpu", ray),
    "serve": ("serve-cpu", serve),
    "many": ("many-cpu", many),
    "out_of_memory": ("out-of-memory-cpu", out_of_memory),
    "assisted": ("assisted-cpu", assisted),
    "branching": ("branching-cpu", branching),
    "scaling": ("scaling-cpu", scaling),
    "speed": ("decode-cpu", speed),
    "half_precision": ("decode-*float16-cpu", half_precision),
    "memory": ("memory-cpu", memory),
    "memory_long": ("memory-long-cpu", memory),
    "reuse": ("reuse-cpu", reuse),
    "compiling": ("compiling-cpu", compiling),
    "startup": ("startup-cpu", startup),
    "weights": ("weights-cpu", weights),
    "structured": ("structured-cpu", structured),
}
"""By the name of the generated part: the file in benchmarks/results, and what makes the part of it."""
