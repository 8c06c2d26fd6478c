"""How results, plans, generators and streams show themselves, are compared and kept in sets; streams are closed."""

import copy
import json
import re
from dataclasses import fields, replace

import pytest
import torch
from architectures import prompt, tiny_model

import engine
from caches.platform.out_of_memory import first_line, in_words


@pytest.fixture(scope="module")
def spoken(shipped):
    return shipped.generate(["def read_lines(path", "x"], cache="static", max_new_tokens=20)


def test_a_result_in_short(spoken):
    text = repr(spoken)
    assert text.startswith(f"Generation(2 rows, {spoken.stats.new_tokens} new tokens, ended: ")
    for part in ("cache='static'", " tokens/s", f"text[0]={spoken.text[0]!r:.20}"):
        assert part in text
    assert "tensor" not in text
    assert "with" not in text


def test_it_stays_short_whatever_is_in_it(spoken):
    many = 10_000
    records = {field.name: (torch.zeros(2, 3),) for field in fields(spoken) if field.default is None}
    out = replace(
        spoken,
        text=["line\n" * 1000] * many,
        tokens=[[5] * 100] * many,
        finish_reasons=["eos", "stop_string", "criteria", "time", "length", None, None, "eos", "eos", "eos"] * 1000,
        **records,
    )
    text = repr(out)
    assert len(text) < 400
    assert text.count("\n") <= 2
    assert "tensor" not in text
    assert "4000 eos, 2000 unfinished, 1000 stop_string" in text
    assert "with scores, logits, attentions" in text
    one = replace(spoken, text=["x"], tokens=[[5]], finish_reasons=[None])
    assert repr(one).startswith("Generation(1 row, ")
    assert "ended: 1 unfinished" in repr(one)
    assert len(repr(replace(spoken, text=["line\n" * 1000]))) < 300
    html = out._repr_html_()
    assert html.count("<tr>") == 21
    assert "and 9,980 rows more" in html
    assert len(html) < 20_000


def test_measurements_in_a_table(spoken):
    shown = str(spoken.stats)
    assert re.search(r"^tokens +\d+ read, 40 new$", shown, re.MULTILINE)
    assert 3 <= shown.count("\n") < 12
    assert max(map(len, shown.splitlines())) < 100
    fallback = engine.Fallback("split", "rows apart", 1, 20, 10)
    stats = replace(spoken.stats, drafted_tokens=40, accepted_tokens=10, fallbacks=(fallback,))
    assert "40 tokens, 10 accepted (25%)" in str(stats)
    assert "rows apart (after 1 token per row" in " ".join(str(stats).split())
    assert str(engine.Stats("none")).count("\n") == 2
    wide = engine.Stats("dynamic", compiled="12 layers of 12 " * 20, drafted_tokens=10**9, accepted_tokens=10**8)
    assert max(map(len, str(wide).splitlines())) <= 80
    assert "\n" not in repr(wide)


def test_results_are_values_of_json(spoken, shipped):
    fallback = engine.Fallback("split", "rows apart", 1, 20, 10)
    stats = replace(spoken.stats, fallbacks=(fallback,)).to_dict()
    assert json.loads(json.dumps(stats)) == stats
    assert stats["fallbacks"][0]["bytes_after"] == 10
    assert set(stats) == {field.name for field in fields(engine.Stats)}
    found = json.loads(json.dumps(spoken.to_dict()))
    assert [row["text"] for row in found["rows"]] == spoken.text
    scored = shipped.generate("x", max_new_tokens=2, top_logprobs=1)
    row = json.loads(json.dumps(scored.to_dict()))["rows"][0]
    assert [token["token"] for token in row["logprobs"]] == row["tokens"] == scored.tokens[0]
    without = engine.generate(tiny_model("llama"), prompt(), max_new_tokens=3).to_dict()
    assert set(without["rows"][0]) == {"tokens", "finish_reason"}
    chunks = [chunk.to_dict() for chunk in shipped.stream("x", max_new_tokens=2)]
    assert json.loads(json.dumps(chunks))[-1]["finish_reason"] == "length"


def test_without_a_tokenizer_it_says_how_to_get_text():
    out = engine.generate(tiny_model("llama"), prompt(), max_new_tokens=3)
    assert out.text is None
    for shown in (repr(out), out._repr_html_()):
        assert "no tokenizer was given (tokenizer=..." in shown
    assert str(out.tokens[0]) in out._repr_html_()


def test_html_of_a_result_is_escaped(spoken):
    html = replace(spoken, text=["<script>alert(1)</script> & more", "b"])._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in html
    assert html.count("<tr>") == html.count("</tr>") == 3
    assert f'<td style="text-align: left; white-space: pre-wrap">{len(spoken.tokens[1])}</td>' in html
    assert spoken.finish_reasons[0] in html


def test_a_plan_in_short_and_as_a_table():
    plan = engine.plan(tiny_model("llama"), prompt_tokens=10, max_new_tokens=4)
    assert len(repr(plan)) < 300
    assert "\n" not in repr(plan)
    assert "choice='dynamic'" in repr(plan)
    assert str(plan).count("\n") > 8
    assert plan.why in " ".join(str(plan).split())
    assert str(plan) != repr(plan)
    html = plan._repr_html_()
    assert html.count("<tr>") == len(plan.backends) + 1
    for part in ("offloaded, residency=disk", plan["dynamic"].longest_context, plan.why, "has no encoder"):
        assert str(part) in html
    assert "<b>" not in replace(plan, model="<b>")._repr_html_()


def test_generators_and_streams_say_what_they_are(shipped):
    assert re.match(r"Generator\(LlamaForCausalLM, float32 on cpu, \w+, EngineConfig\(\)\)$", repr(shipped))
    model = tiny_model("llama")
    generator = engine.Generator(model, config=engine.EngineConfig(cache="static"))
    assert repr(generator) == "Generator(LlamaForCausalLM, float32 on cpu, no tokenizer, EngineConfig(cache='static'))"
    coded = engine.Generator(copy.deepcopy(tiny_model("llama")), config=engine.EngineConfig(weights="int8"))
    assert repr(coded).startswith("Generator(LlamaForCausalLM, codes of 8 bits (the rest float32) on cpu, ")
    stream = generator.stream(prompt(), max_new_tokens=3)
    assert repr(stream) == "Stream(LlamaForCausalLM, float32 on cpu, cache='static', 0 new tokens shown)"
    shown = len(next(stream).tokens)
    assert f"{shown} new tokens shown" in repr(stream)
    list(stream)
    assert "6 new tokens shown" in repr(stream)
    stream.result()
    assert "cache='static', 6 new tokens shown" in repr(stream)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "ValueError"),
        ("one line", "one line"),
        ("\nneeds one of:\n(1) a file\n(2) another", "needs one of: (1) a file"),
        ("nothing after this:", "nothing after this:"),
        ("torch says so (originally from a place)", "torch says so"),
    ],
)
def test_messages_of_other_libraries_are_not_cut_at_a_colon(text, shown):
    assert first_line(ValueError(text)) == shown
    assert in_words(ValueError("word " * 100)).endswith("word ...")


def test_results_and_plans_equal_only_themselves():
    generator = engine.Generator(tiny_model("llama"))
    out, other = (generator.generate(prompt(), max_new_tokens=3, output_scores=True) for _ in range(2))
    plan, again = (engine.plan(generator.model, prompt_tokens=8, max_new_tokens=4, cache="dynamic") for _ in range(2))
    for one, two in ((out, other), (plan, again), (plan["dynamic"], again["dynamic"])):
        assert one == one
        assert one != two
        assert two != replace(two)
        assert len({one, two, one}) == 2
    assert plan.to_dict()["backends"] == again.to_dict()["backends"]


@pytest.mark.parametrize("leave", ["close", "with", "with an error"])
def test_a_stream_is_closed(leave):
    generator = engine.Generator(tiny_model("llama"))
    ids = torch.tensor([[5, 6, 7]])
    pieces = generator.stream(ids, max_new_tokens=9)
    assert len(next(pieces).tokens) == 1
    if leave == "close":
        pieces.close()
    elif leave == "with":
        with pieces as entered:
            assert entered is pieces
    else:
        with pytest.raises(ZeroDivisionError), pieces:
            raise ZeroDivisionError
    assert list(pieces) == []
    out = pieces.result()
    assert out.stats.new_tokens == 1
    assert out.cache.get_seq_length() == ids.shape[1]
    pieces.close()
