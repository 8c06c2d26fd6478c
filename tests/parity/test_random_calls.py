"""Random calls say what transformers says, or docs/reference/differences.md tells why not."""

import pytest
import torch
import transformers
from random_calls import MODELS, cells, draw, play
from random_outcomes import outcome, run

import caches

CALLS, MORE, CHUNK = 200, 500, 250  # `make random-calls` goes on to 20,000
NAMES = ["DynamicCache", "GenerationConfig", "LogitsProcessorList", "StoppingCriteriaList", "WatermarkingConfig"]
FLOOR = 0.4  # of the calls of every model are compared, at least


def check(seeds):
    counts, examples, failures = play(seeds)
    assert not failures, "\n\n".join(failures)
    assert counts["equal"] > 0.5 * len(seeds), counts  # else little was compared
    assert counts["equal in float64"] <= 0.01 * len(seeds) + 1, counts
    compared = {seed for kind, found in examples.items() if kind.startswith("equal") for seed in found}
    if len(seeds) >= CHUNK:
        for name in MODELS:
            of_model = {seed for seed in seeds if draw(seed).name == name}
            assert len(of_model & compared) >= FLOOR * len(of_model), name


@pytest.mark.parametrize("begin", range(0, CALLS, 50))
def test_the_first_calls(begin):
    check(range(begin, begin + 50))


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(CALLS, CALLS + MORE, CHUNK))
def test_more_calls(begin):
    check(range(begin, begin + CHUNK))


def test_the_first_calls_are_of_all_kinds():
    calls = [draw(seed) for seed in range(CALLS)]
    assert {(call.name, call.backend) for call in calls} == set(cells())
    assert {call.name for call in calls} == set(MODELS)
    lossy = {"quantized", "offloaded_quantized", "quantized_sink", "sink", "sliding_window"}
    assert {call.backend for call in calls} >= set(caches.names()) - lossy
    assert {call.mode for call in calls} >= {"greedy", "sample", "beams", "beam sampling", "draft", "lookup"}
    given = {name for call in calls for name in call.given}
    assert given >= {"inputs_embeds", "encoder_outputs", "decoder_input_ids", "stop_strings", "stopping_criteria",
                     "logits_processor", "generation_config", "guidance_scale", "output_hidden_states"}  # fmt: skip
    assert any(call.setup for call in calls)
    assert any(call.turn for call in calls)


def test_the_script_of_a_call_makes_that_call(capsys, monkeypatch):
    monkeypatch.setattr(transformers, "__all__", NAMES)  # all of it takes long to import
    seed = next(seed for seed in range(CALLS) if not draw(seed).setup and outcome(draw(seed))[0] == "equal")
    names = {}
    exec(draw(seed).script(), names)
    assert "sequences" in capsys.readouterr().out
    assert torch.equal(names["ours"].sequences, run(draw(seed), ours=True).sequences)
