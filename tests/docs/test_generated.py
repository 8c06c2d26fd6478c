"""The parts of the documentation that tests write: `UPDATE_DOCS=1` writes them anew.

The tables of caches, refusals and strategies are those of tests/contract.
"""

import hashlib
import importlib
import inspect
import json
import re

import benchmark_tables
import pytest
import typer
from benchmark_tables import TABLES
from pages import DOCS, check_generated, check_marked
from places import README, ROOT

import caches
import configs
import engine
from engine.cli import options
from engine.cli.main import app
from engine.parameters import PARAMETERS, help_of, words_of

RESULTS = ROOT / "benchmarks" / "results"


def results(name):
    """The reports of a benchmark, one per kind of processor."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"*/{name}.json"))]


@pytest.mark.parametrize("name", TABLES)
def test_the_figures_are_those_measured(name):
    file, table = TABLES[name]
    check_generated(name, "\n".join(map(table, results(file))))


def test_the_readmes_speed_is_measured():
    check_marked(README, "speed", benchmark_tables.short_speed(results("decode-cpu")))


def test_the_factors_in_the_readme_are_measured():
    cases = [case for name in ("memory-cpu", "memory-long-cpu") for one in results(name) for case in one["cases"]]
    fused = {4096: [], 16384: []}
    for case in [case for case in cases if case["context"] in fused]:
        rows = case["rows"].items()
        fused[case["context"]] += [row["times_peer"] for name, row in rows if name.endswith("4 bits, fused")]
    cases = [case for report in results("branching-cpu") for case in report["cases"].values()]
    branching = [case["times_peer"] for case in cases if "ours" in case["engines"]]
    branching = [times for times in branching if times is not None and times > 1]
    text = " ".join(README.read_text().split())
    short, long = (f"{min(times):.1f} to {max(times):.1f}" for times in fused.values())
    assert f"[{short} times](docs/benchmarks/memory.md)" in text
    assert f"after 4096 tokens, and {long} times after 16,384." in text
    assert f"{min(branching):.0f} to {max(branching):.0f} times as fast" in text
    short, long = json.loads((RESULTS / "intel-xeon-avx512" / "decode-bfloat16-cpu.json").read_text())["cases"]
    best, *peers = "static, compiled", "transformers dynamic", "llama.cpp, BF16"
    steps = [f"{short['engines_ms'][name]['median']:.1f}" for name in (best, *peers)]
    assert "takes {} ms per token, with transformers {} and with llama.cpp {};".format(*steps) in text
    firsts = [f"{long['first_token_ms'][name]['median'] / 1000:.1f}" for name in (best, *peers)]
    assert "the first token after 1000 {} s, {} s and {} s.".format(*firsts) in text


def test_the_negative_results_are_measured():
    """Each figure is a number in the tables of the page that its row links to."""
    folder = DOCS / "benchmarks"
    rows = [row for row in (folder / "negative-results.md").read_text().splitlines() if row.startswith("| ")]
    found = 0
    for row in rows:
        links = re.findall(r"\]\(([\w-]+\.md)\)", row)
        tables = [name for link in links for name in re.findall(r'^--8<-- "(.+)"', (folder / link).read_text(), re.M)]
        measured = "".join((ROOT / name).read_text() for name in tables)
        for figure in re.findall(r"\d+\.\d+|\d,\d{3}", row):
            assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d)", measured), (figure, links)
            found += 1
    assert found > 10


@pytest.mark.parametrize("report", sorted(RESULTS.glob("quality/*.json")), ids=lambda report: report.stem)
def test_the_tables_of_quality_are_those_measured(report, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    document = importlib.import_module("lossy.markdown").document
    assert report.with_suffix(".md").read_text() == document(json.loads(report.read_text()))


@pytest.mark.parametrize("plot", sorted(RESULTS.glob("*/*.svg")), ids=lambda plot: f"{plot.parent.name}-{plot.stem}")
def test_a_plot_is_of_these_results(plot):
    shown = DOCS / "benchmarks" / f"{plot.stem.removesuffix('-cpu')}-{plot.parent.name}.svg"
    assert shown.resolve() == plot
    digest = hashlib.sha256(plot.with_suffix(".json").read_bytes()).hexdigest()
    assert digest in plot.read_text()


def test_the_trees_of_errors_are_those_of_the_code():
    trees = [inspect.getdoc(module).partition("\n\n")[2] for module in (engine.errors, caches.errors)]
    check_generated("errors", "\n".join(f"```text\n{tree}\n```\n" for tree in trees))


def test_the_commands_are_those_of_the_parser():
    check_generated("cli", "\n".join(_command(*found) for found in typer.main.get_command(app).commands.items()))


def _command(name, command):
    panels = {}
    for parameter in command.params:
        usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
        panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(parameter)
    lines = [f"## engine {name}", "", *command.help.replace("\b\n", "").splitlines(), ""]
    for title, parameters in panels.items():
        lines += [f"### {title} {{ #{name}-{title.lower().replace(' ', '-')} }}", ""]
        rows = [[_names(one), (one.help or "").replace("|", "\\|") + _default(one)] for one in parameters]
        lines += [*benchmark_tables.table(["option", "what it does"], rows), ""]
    return "\n".join(lines)


def test_the_parameters_are_those_of_the_table():
    rows = []
    for name, row in PARAMETERS.items():
        kind = words_of(name).replace("|", "\\|")
        option = ", ".join(f"`{each}`" for each in (options.option_name(name), *row.flag.names)) if row.flag else ""
        field = f"`{row.field.name or f'engine.{name}'}`" if row.field else ""
        default = f" Default: {row.default}." if row.default else ""
        rows.append([f"`{name}`", f"`{kind}`", help_of(name).replace("|", "\\|") + default, option, field])
    head = ["parameter", "type", "what it means", "option", "field of a request"]
    check_generated("parameters", benchmark_tables.text(benchmark_tables.table(head, rows)))


def _default(parameter):
    """The default that the parser has; those that the text states itself are None there."""
    is_given = parameter.param_type_name == "option" and parameter.default not in (None, False)
    default = f"{parameter.default:g}" if isinstance(parameter.default, float) else parameter.default
    return f" Default: {default}." if is_given else ""


def _names(parameter):
    metavar = f" {parameter.metavar}" if parameter.metavar and parameter.param_type_name == "option" else ""
    names = (
        [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else [parameter.metavar]
    )
    return ", ".join(f"`{name}{metavar}`" for name in names)


def test_the_presets_are_those_of_the_package():
    rows = []
    for name in configs.presets():
        changed = configs.preset(name).to_dict(use_diff=True)
        rows.append([f"`{name}`", ", ".join(f"`{field}={value!r}`" for field, value in changed.items())])
    check_generated("presets", benchmark_tables.text(benchmark_tables.table(["preset", "what it sets"], rows)))


def test_the_options_of_the_caches_are_those_of_their_configurations():
    parts = []
    for name in caches.names():
        options = caches.recipe(name).options
        rows = [[f"`{field}`", f"`{value!r}`"] for field, value in options.defaults().items()]
        table = benchmark_tables.table(["option", "default"], rows) if rows else "No options."
        parts += [
            f"### `{name}` {{ #{name} }}",
            f"{caches.recipe(name).summary} Options: `configs.{options.__name__}`.",
        ]
        parts.append(table)
    check_generated("cache_options", benchmark_tables.text(*parts))
