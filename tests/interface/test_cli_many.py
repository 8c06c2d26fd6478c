"""`engine generate --jsonl`: many prompts into a file that can be resumed."""

import json

import pytest


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
    assert "at least 1" in whole[2]["error"]
    kept = next(line for line in out.read_text().splitlines() if json.loads(line)["index"] == 1)
    out.write_text(kept + '\n{"index": 0, "ro')
    prompts.write_text(prompts.read_text().replace('"num_beams": 0', '"num_beams": 2'))
    assert cli(command).exit_code == 0
    assert out.read_text().splitlines()[0] == kept
    again = lines(out)
    assert [one["index"] for one in again] == [0, 1, 2]
    assert again[0]["rows"] == whole[0]["rows"]
    assert len(again[2]["rows"][0]["tokens"]) == 4


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


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ("import os\n", ["--json"], "leave --stream, --json and --stats out"),
        ("import os\n", ["--stream"], "leave --stream, --json and --stats out"),
    ],
)
def test_what_does_not_go_together(cli, tmp_path, content, options, says):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    prompts.write_text(content)
    result = cli(["generate", "--file", str(prompts), "--jsonl", str(out), *options])
    assert result.exit_code == 2
    assert says in result.stderr
    assert not out.exists()


def test_another_file_is_not_written_to(cli, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "notes.txt"
    prompts.write_text('"import"\n')
    out.write_text("my notes\n")
    result = cli(["generate", "--file", str(prompts), "--jsonl", str(out)])
    assert result.exit_code == 2
    assert "name another file" in result.stderr
    assert out.read_text() == "my notes\n"
    prompts.write_text('"import"\n{no json\n')
    assert "line 2" in cli(["generate", "--file", str(prompts), "--jsonl", str(tmp_path / "o")]).stderr
