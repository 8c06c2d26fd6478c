"""`engine generate --jsonl`: many prompts into a file that can be resumed."""

import json
import os
import threading

import pytest

import engine


def lines(path):
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda found: found["index"])


def test_every_line_of_a_file_is_a_prompt(cli, shipped, tmp_path):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    prompts.write_text("import os\n\ndef main():\n")
    cli(["generate", "--file", str(prompts), "--jsonl", str(out), "--max-new-tokens", "6"])
    found = lines(out)
    assert [one["index"] for one in found] == [0, 1]
    for one, prompt in zip(found, ("import os", "def main():"), strict=True):
        assert one["rows"][0]["text"] == shipped.generate(prompt, max_new_tokens=6).text[0]
        assert one["stats"]["new_tokens"] == 6


def test_it_goes_on_where_it_was_stopped(cli, tmp_path):
    """A line that was not finished and a prompt with an error are done again, the others are not."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts.write_text('"import"\n{"prompt": "def", "do_sample": true, "seed": 2}\n{"prompt": "x", "num_beams": 0}\n')
    command = ["generate", "--file", str(prompts), "--jsonl", str(out), "--max-new-tokens", "4"]
    failed = cli(command)
    assert failed.exit_code == 2
    assert "1 of 3 prompts failed" in failed.stderr
    whole = lines(out)
    assert "num_beams=0, but it is a whole number, 1 or more" in whole[2]["error"]
    kept = next(line for line in out.read_text().splitlines() if json.loads(line)["index"] == 1)
    out.write_text(kept + '\n{"index": 0, "ro')
    prompts.write_text(prompts.read_text().replace('"num_beams": 0', '"num_beams": 2'))
    assert cli(command).exit_code == 0
    assert out.read_text().splitlines()[0] == kept
    again = lines(out)
    assert [one["index"] for one in again] == [0, 1, 2]
    assert again[0]["rows"] == whole[0]["rows"]
    assert len(again[2]["rows"][0]["tokens"]) == 4


def test_lines_into_a_pipe(cli, tmp_path):
    """It waited for ever: a pipe was read first for what it could go on from."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.extend(pipe.read_text().splitlines()), daemon=True)
    reader.start()
    assert cli(["generate", "import", "def", "-n", "3", "--jsonl", str(pipe)]).exit_code == 0
    reader.join(60)
    assert sorted(json.loads(line)["index"] for line in read) == [0, 1]


def test_lines_end_at_line_feeds_only(cli, shipped, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts.write_text('"a\u2028b"\r\n{"prompt": "c\u0085d", "max_new_tokens": 2}\n', newline="")
    assert cli(["generate", "--file", str(prompts), "--jsonl", str(out), "--max-new-tokens", "3"]).exit_code == 0
    expected = [shipped.generate(prompt, max_new_tokens=3).text[0] for prompt in ("a\u2028b", "c\u0085d")]
    assert lines(out)[0]["rows"][0]["text"] == expected[0]
    assert len(lines(out)[1]["rows"][0]["tokens"]) == 2


def test_every_line_as_a_chat(cli, shipped, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts.write_text('"import"\n{"prompt": "def", "max_new_tokens": 2}\n')
    command = ["generate", "--chat", "--system", "# s", "--file", str(prompts), "--jsonl", str(out), "-n", "4"]
    assert cli(command).exit_code == 0
    for one, text, most in zip(lines(out), ("import", "def"), (4, 2), strict=True):
        messages = [{"role": "system", "content": "# s"}, {"role": "user", "content": text}]
        assert one["rows"][0]["text"] == shipped.generate([messages], max_new_tokens=most).text[0]
    prompts.write_text("[1, 2]\n")
    assert "makes a chat of a text, and prompt 1 is none: [1, 2]" in cli(command).stderr


NOT_WRITTEN = {
    "text": "my notes\n",
    "no text": b"\xff\xfe\n",
    "an object": '{"precious": 1}\n',
    "an object without an end of line": '{"precious": 1, "no newline at end": 2}',
    "an index": '{"index": 0, "precious": 1}\n',
    "an index without an end of line": '{"index": 0, "precious": 1}',
    "rows of another kind": '{"index": 0, "rows": 5}\n',
    "an index of another kind": '{"index": "0", "rows": []}\n',
    "behind a line of its own": '{"index": 0, "error": "no"}\nmy notes',
}


@pytest.mark.parametrize("content", NOT_WRITTEN.values(), ids=NOT_WRITTEN)
def test_another_file_is_not_written_to(cli, tmp_path, content):
    out, content = tmp_path / "notes", content if isinstance(content, bytes) else content.encode()
    out.write_bytes(content)
    done = cli(["generate", "import", "--jsonl", str(out), "-n", "2"])
    assert (done.exit_code, out.read_bytes()) == (2, content)
    assert "has lines that --jsonl has not written" in done.stderr
    assert "name another file" in done.stderr


@pytest.mark.parametrize("rest", ["{", '{"index": ', '{"index": 12', '{"index": 0, "dig', '{"index": 0, "rows": [{"te'])
def test_the_beginning_of_a_line_is_written_again(cli, tmp_path, rest):
    out, kept = tmp_path / "texts.jsonl", '{"index": 1, "rows": []}\n'
    out.write_text(kept + rest)
    done = cli(["generate", "import", "def", "--jsonl", str(out), "-n", "2"])
    assert done.exit_code == 0
    assert done.stderr == f"(1 of 2 prompts have their text in {out} already)\n"
    assert out.read_text().startswith(kept)
    assert [one["index"] for one in lines(out)] == [0, 1]


def test_the_file_of_the_prompts_is_not_written_to(cli, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "linked.jsonl"
    out.symlink_to(prompts)
    prompts.write_text('"import"\n"def"')
    for path in (prompts, out):
        done = cli(["generate", "--file", str(prompts), "--jsonl", str(path)])
        assert done.exit_code == 2
        assert f"--jsonl {path} has the prompts of --file {prompts}" in done.stderr
    assert prompts.read_text() == '"import"\n"def"'


def test_lines_that_are_no_json(cli, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"import"\n{no json\n')
    assert "line 2" in cli(["generate", "--file", str(prompts), "--jsonl", str(tmp_path / "o")]).stderr
    for line in ("null", '{"custom_id": "a"}', '{"prompt": null, "id": 3}'):
        prompts.write_text(f'"import"\n{line}\n')
        assert "line 2 of" in (said := cli(["generate", "--file", str(prompts)]).stderr)
        assert "has no prompt" in said
    prompts.write_text("[" * 100_000)
    assert "line 1 of" in cli(["generate", "--file", str(prompts)]).stderr


def test_a_mark_at_the_beginning_of_a_file_is_no_text(cli, tmp_path):
    marked, plain = tmp_path / "marked.txt", tmp_path / "plain.txt"
    marked.write_bytes("\ufeffimport os\n".encode())
    plain.write_text("import os\n")
    texts = [cli(["generate", "--file", str(file), "-n", "4", "--json"]).stdout for file in (marked, plain)]
    rows = [json.loads(text)["rows"] for text in texts]
    assert rows[0] == rows[1]


def test_texts_of_other_prompts_or_options_are_not_taken(cli, tmp_path):
    out, config = tmp_path / "texts.jsonl", tmp_path / "config.json"
    config.write_text('{"cache": {"name": "static", "max_cache_len": 64}}')
    shared = ["--jsonl", str(out), "-n", "2"]
    assert cli(["generate", "import", "def", *shared]).exit_code == 0
    written = out.read_text()
    for arguments, differs in [
        (["import", "class"], "index 1:"),
        (["def", "import"], "index 0 (and 1 more):"),
        (["import", "def", "--top-k", "2"], "index 0 (and 1 more):"),
        (["import", "def", "--model", str(engine.SHIPPED_MODEL)], "index 0 (and"),
        (["import", "def", "--cache", "sink"], "index 0 (and"),
        (["import", "def", "--cache-option", "max_batch_size=9"], "index 0 (and"),
        (["import", "def", "--weights", "int8"], "index 0 (and"),
        (["import", "def", "--dtype", "bfloat16"], "index 0 (and"),
        (["import", "def", "--config", str(config)], "index 0 (and"),
    ]:
        done = cli(["generate", *arguments, *shared])
        assert (done.exit_code, out.read_text()) == (2, written), arguments
        assert f"{out} has the text of another prompt or of other options for {differs}" in done.stderr
        assert "name another file, or remove this one" in done.stderr
    again = cli(["generate", "import", "def", "os", *shared, "--prefill-chunk-tokens", "8", "--compile", "off"])
    assert (again.exit_code, again.stderr) == (0, f"(2 of 3 prompts have their text in {out} already)\n")
    assert out.read_text().startswith(written)
    assert len({one["digest"] for one in lines(out)}) == 3


def test_texts_without_a_digest_are_kept(cli, tmp_path):
    """As earlier versions wrote them."""
    out, written = tmp_path / "texts.jsonl", '{"index": 0, "rows": []}\n'
    out.write_text(written)
    assert cli(["generate", "import", "--jsonl", str(out)]).exit_code == 0
    assert out.read_text() == written


def test_the_lines_of_a_jsonl_file_are_printed(cli, shipped, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '"import os"\n\n{"id": 7, "prompt": "caf\\u00e9 = ", "max_new_tokens": 2}\n'
        '{"custom_id": "c", "messages": [{"role": "user", "content": "x"}]}\n',
        encoding="utf-8",
    )
    done = cli(["generate", "-f", str(prompts), "-n", "3", "--json"])
    assert done.exit_code == 0, done.stderr
    found = sorted(map(json.loads, done.stdout.splitlines()), key=lambda one: one["index"])
    assert [one["rows"][0]["text"] for one in found] == [
        shipped.generate(prompt, max_new_tokens=count).text[0]
        for prompt, count in (("import os", 3), ("café = ", 2), ([{"role": "user", "content": "x"}], 3))
    ]
    assert [(one.get("id"), one.get("custom_id")) for one in found] == [(None, None), (7, None), (None, "c")]


def test_labels_are_in_the_file_and_no_part_of_the_prompt(cli, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "import"}\n{"id": "b", "prompt": "def", "num_beams": 0}\n')
    command = ["generate", "-f", str(prompts), "--jsonl", str(out), "-n", "3"]
    assert cli(command).exit_code == 2
    assert [one["id"] for one in lines(out)] == ["a", "b"]
    assert "error" in lines(out)[1]
    prompts.write_text('{"id": "other", "prompt": "import"}\n{"id": "b", "prompt": "def"}\n')
    assert cli(command).exit_code == 0  # the text of the first one stays
    assert [one["id"] for one in lines(out) if "rows" in one] == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["a.jsonl", "b.txt"], [], "b.txt is one prompt, and the lines of a .jsonl file are one each: run them apart"),
        (["a.jsonl"], ["--stream"], "for the lines of a .jsonl file JSON is printed"),
        (["a.jsonl"], ["--stats"], "leave --stream and --stats out"),
        (["a.txt"], ["--jsonl", "OUT", "--json"], "leave --stream, --json and --stats out"),
        (["a.txt"], ["--jsonl", "OUT", "--stream"], "leave --stream, --json and --stats out"),
    ],
    ids=str,
)
def test_what_lines_are_not_for(cli, tmp_path, names, options, message):
    out = tmp_path / "out"
    for name in names:
        (tmp_path / name).write_text('"x"\n')
    files = [word for name in names for word in ("-f", str(tmp_path / name))]
    done = cli(["generate", *files, *(str(out) if word == "OUT" else word for word in options)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert not out.exists()


def test_json_has_real_characters_where_there_are_such(cli, tmp_path, monkeypatch):
    from engine.cli.rendering import as_json

    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts.write_text('{"id": "é漢🙂", "prompt": "x"}\n', encoding="utf-8")
    assert cli(["generate", "-f", str(prompts), "--jsonl", str(out), "-n", "2"]).exit_code == 0
    assert '"id": "é漢🙂"' in out.read_text(encoding="utf-8")
    assert '"é漢🙂"' in cli(["generate", "-f", str(prompts), "-n", "2"]).stdout
    for value, encoding in (("é", "ascii"), ("é漢", "latin-1"), ("\ud800", "utf-8"), ("é", None)):
        written = as_json({"x": value}, encoding)
        assert written.isascii()
        assert json.loads(written) == {"x": value}
