"""`engine score`: texts from arguments, files and standard input, as a table and as JSON."""

import inspect
import json
import math

import pytest

import engine
from engine.cli import options

TEXTS = ["import os\n", "def main():\n    return 0\n"]


def test_a_table(cli, shipped, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli(["score", *TEXTS]).stdout
    scores = shipped.score(TEXTS)
    head, *rows = [line.rsplit(maxsplit=3) for line in shown.splitlines()]
    assert head[0].split() == ["text", "tokens"]
    assert [row[0] for row in rows] == ["import os", "def main(): return 0", "all"]
    both = math.exp(-sum(score.logprob for score in scores) / sum(len(score.logprobs) for score in scores))
    found = [float(row[3].replace(",", "")) for row in rows]
    assert found == pytest.approx([*(score.perplexity for score in scores), both], rel=1e-3)
    assert [int(row[1]) for row in rows] == [*(len(score.tokens) for score in scores), 10]
    assert max(map(len, cli(["score", "import os\n" * 40]).stdout.splitlines())) <= 80


def test_files_as_json(cli, shipped, tmp_path):
    lines, plain = tmp_path / "lines.jsonl", tmp_path / "plain.py"
    plain.write_text(TEXTS[0])
    lines.write_text(
        '"import os"\n\n{"id": "b", "text": "class Path:"}\n[5, 6, 7]\n{"custom_id": 3, "prompt": "x = 1"}\n'
    )
    found = json.loads(cli(["score", "-f", str(lines), "--file", str(plain), "--rows", "2", "--json"]).stdout)
    expected = [
        score for text in ("import os", "class Path:", [5, 6, 7], "x = 1", TEXTS[0]) for score in shipped.score(text)
    ]
    assert [row["tokens"] for row in found["rows"]] == [list(score.tokens) for score in expected]
    for row, score in zip(found["rows"], expected, strict=True):
        assert row["logprobs"] == pytest.approx(score.logprobs, abs=1e-4)
        assert row["perplexity"] == pytest.approx(score.perplexity, rel=1e-4)
    assert [(row.get("id"), row.get("custom_id")) for row in found["rows"]][1:4:2] == [("b", None), (None, 3)]
    assert found["logprob"] == pytest.approx(sum(score.logprob for score in expected), abs=1e-3)
    titles = [line.split()[0] for line in cli(["score", "-f", str(lines), "-f", str(plain)]).stdout.splitlines()]
    assert titles == ["text", "import", "b", "[5,", "3", "plain.py", "all"]


@pytest.mark.parametrize("words", [["-"], []])
def test_standard_input_with_a_window(cli, shipped, words):
    text = "import os\nimport re\nimport sys\n"
    window = ["--cache", "sink", "--cache-option", "window_length=8", "--piece-tokens", "1", "--json"]
    [row] = json.loads(cli(["score", *words, *window], text).stdout)["rows"]
    [expected] = shipped.score(text, piece_tokens=1, cache="sink", cache_config={"window_length": 8})
    assert row["logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"message": "a"}', "has no text: "),
        ("null", "line 1 of"),
        ('{"text": 5}', "has no text: {'text': 5}"),
        ("{", "no JSON"),
        ("\n", "there is no text in"),
    ],
)
def test_lines_without_a_text(cli, tmp_path, line, said):
    file = tmp_path / "lines.jsonl"
    file.write_text(line)
    done = cli(["score", "-f", str(file)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "-f", "b"], "the text was given twice: as TEXT and as --file"),
        (["x"], "has 1 token, and a score begins with the second one"),
        (["import os", "--cache", "nothing"], "nothing"),
    ],
)
def test_refusals(cli, words, said):
    done = cli(["score", *words])
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


def test_the_defaults_in_the_help_are_those_of_python():
    parameters = inspect.signature(engine.Generator.score).parameters
    for name in ("rows", "piece_tokens"):
        assert f"efault: {parameters[name].default}." in options.SCORED[name].info.help
