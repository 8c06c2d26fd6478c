"""The tables of a report of `quality.py`, in Markdown."""

from __future__ import annotations

import statistics
from typing import Any

Report = dict[str, Any]


def document(report: Report) -> str:
    """All tables, with a heading each."""
    parts = [
        f"Model `{report['model']}`, {report['parameters'] / 1e6:.1f} million parameters; {report['texts']} texts of "
        f"{report['text_tokens']} tokens, the last {report['residual_length']} of a quantized cache (and up to a block "
        "more) in full, where its name says nothing else. Full precision is float32. KL is in nats per token, against "
        "the model in full.",
        _caches(report),
    ]
    for name, title in (("model", "Weights"), ("twin", "Weights of the twin, which lie on no grid")):
        if name in report["weights"]:
            parts += [f"**{title}**", _weights(report, name)]
    parts += [_answers(report), _stream(report["stream"]) if "stream" in report else ""]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    align = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, align, *rows])


def _row(name: str, bits: list[str], measured: Report, full: Report, lengths: list[str]) -> list[str]:
    facts = measured.get("facts") or {}
    change = measured["perplexity"] / full["perplexity"] - 1
    return [
        name, *bits, f"{measured['kl']:.5f}", f"{measured['same_top']:.1%}", f"{measured['perplexity']:,.3f}",
        f"{change:+,.2%}", *("" if facts.get(length) is None else str(facts[length]) for length in lengths),
    ]  # fmt: skip


def _lengths(report: Report) -> list[str]:
    return list(next(iter(report["caches"].values()))["facts"])


def _measures(report: Report) -> list[str]:
    facts = [f"of {report['facts']} facts in {size} tokens" for size in _lengths(report)]
    return ["KL", "same top token", "perplexity", "against full", *facts]


def _caches(report: Report) -> str:
    lengths, full, rows = _lengths(report), report["full"], []
    for name, measured in report["caches"].items():
        encoded = "" if measured["encoded_bits"] is None else f"{measured['encoded_bits']:.2f}"
        rows.append(_row(name, [encoded, f"{measured['bits']:.2f}"], measured, full, lengths))
    for name, measured in report["peer"].get("model", {}).get("caches", {}).items():
        bits = f"{measured['bits']:.2f}"
        rows.append(_row(f"llama.cpp {name}", [bits, bits], measured, full, lengths))
    head = ["cache", "bits per encoded value", f"bits per value after {report['text_tokens']} tokens"]
    return _table([*head, *_measures(report)], rows)


def _weights(report: Report, name: str) -> str:
    lengths, full = _lengths(report), report["full"]
    peers = report["peer"].get(name, {})
    measured = report["weights"][name] | {f"llama.cpp {kind}": row for kind, row in peers.get("weights", {}).items()}
    if "F32" in peers.get("caches", {}):
        measured["llama.cpp F32"] = peers["caches"]["F32"]
    by_size = sorted(measured.items(), key=lambda item: -item[1]["bits"])
    rows = [_row(kind, [f"{row['bits']:.2f}"], row, full, lengths) for kind, row in by_size]
    return _table(["weights", "bits per weight", *_measures(report)], rows)


def _answers(report: Report) -> str:
    """One question per row, one kind of weights per column."""
    answers = {
        f"{kind}{', twin' if name == 'twin' else ''}": row["answers"]
        for name, rows in report["weights"].items()
        for kind, row in rows.items()
        if row["answers"]
    }
    if not answers:
        return ""
    rows = [
        [question, *(" ".join(texts[number].split()).replace("|", "\\|") for texts in answers.values())]
        for number, question in enumerate(report["questions"])
    ]
    return _table(["question", *answers], rows)


def _stream(stream: Report) -> str:
    width, rows = stream["windows"] // 5, []
    for name, per_window in stream["perplexity"].items():
        fifths = [per_window[begin : begin + width] for begin in range(0, 5 * width, width)]
        cells = [f"{statistics.geometric_mean(fifth):.2f}" if len(fifth) == width else "" for fifth in fifths]
        ratio = stream["to_inside_the_window"].get(name)
        sizes = sorted(set(stream["least_and_most_bytes"].get(name, [])))
        cells += ["" if ratio is None else f"{ratio:.3f}", " to ".join(f"{size:,}" for size in sizes)]
        rows.append([name, *cells])
    windows = [f"windows {begin + 1} to {begin + width}" for begin in range(0, 5 * width, width)]
    title = f"Perplexity of one text of {stream['windows']} windows of {stream['window']} tokens, read token by token:"
    return f"{title}\n\n" + _table(["cache", *windows, "all, relative to inside the window", "bytes"], rows)
