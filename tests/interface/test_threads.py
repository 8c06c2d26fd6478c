"""Several threads on one model: they take turns, and each gets what it would get alone."""

import copy
import random
import threading
import time

import pytest
import torch
from architectures import _TINY, ids_of, prompt, tiny_model
from leaks import hidden_layer
from references import draft_of
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import engine
from caches.platform.device_state import Peak
from engine.kernels import linear_backend, linear_routes

CALLS = [
    {},
    {"cache": "static"},
    {"cache": "auto"},
    {"cache": "offloaded"},
    {"cache": "none"},
    {"cache": "quantized", "cache_config": {"residual_length": 8}},
    {"cache": "sink", "cache_config": {"window_length": 12, "num_sink_tokens": 2}},
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 3, "cache": "static"},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"penalty_alpha": 0.6, "top_k": 3},
    {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    {"prompt_lookup_num_tokens": 3},
    {"assistant_model": "draft"},
    {"assistant_model": "draft", "cache": "static"},
    {"guidance_scale": 1.5},
]
FEW = [CALLS[1], CALLS[5], CALLS[8], CALLS[13]]


def text_of(generator, name, call, inputs, streams=False):
    options = call | ({"assistant_model": draft_of(name)} if "assistant_model" in call else {}) | {"max_new_tokens": 10}
    if not streams:
        return generator.generate(inputs, **options).tokens
    tokens = {}
    for piece in generator.stream(inputs, **options):
        tokens.setdefault(piece.row, []).extend(piece.tokens)
    return [tokens[row] for row in sorted(tokens)]


def check_two_threads(name, several, cells, calls, seed):
    """Each makes this many calls, chosen at random. several: whether they have a generator each, over one model."""
    config = engine.EngineConfig(linears="onednn" if linear_backend.has_onednn() else "default")
    alone, first, second = (engine.Generator(tiny_model(name), config=config) for _ in range(3))
    inputs = [prompt(rows=2, pads=3), prompt(rows=1, pads=0)]
    expected = [(call, given, text_of(alone, name, call, given)) for call in cells for given in inputs]
    begin, ended = threading.Barrier(2), []

    def work(generator, chosen):
        begin.wait()
        for _ in range(calls):
            call, given, tokens = chosen.choice(expected)
            assert text_of(generator, name, call, given, chosen.random() < 0.5) == tokens, call
            if chosen.random() < 0.05:
                generator.release()
        ended.append(calls)

    pairs = [(first, random.Random(seed)), (second if several else first, random.Random(seed + 1))]
    for thread, errors in [in_thread(lambda pair=pair: work(*pair)) for pair in pairs]:
        thread.join()
        assert not errors
    assert ended == [calls] * 2


@pytest.mark.parametrize("several", [False, True], ids=["one generator", "two generators"])
def test_texts_are_those_of_one_thread(several):
    check_two_threads("llama", several, FEW, calls=3, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "jamba"])
@pytest.mark.parametrize("several", [False, True], ids=["one generator", "two generators"])
def test_many_texts_are_those_of_one_thread(several, name):
    cells = [call for call in CALLS if name != "jamba" or call.get("cache") not in ("quantized", "sink")]
    check_two_threads(name, several, cells, calls=20, seed=4)


def in_thread(work):
    """The thread, and what it raised."""
    errors = []

    def run():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def test_forwards_do_not_overlap():
    model, inside, most = tiny_model("llama"), [], []

    def enter(*_):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)

    hooks = [
        model.model.layers[0].register_forward_pre_hook(enter),
        model.model.layers[-1].register_forward_hook(lambda *_: inside.clear() if len(inside) == 1 else None),
    ]
    try:
        assert engine.Generator(model).facts.why_not_in_cache is None  # a trial, with these hooks
        most.clear()
        work = [in_thread(lambda: engine.generate(model, prompt(), max_new_tokens=8)) for _ in range(2)]
        for thread, errors in work:
            thread.join(30)
            assert not errors
    finally:
        for hook in hooks:
            hook.remove()
    assert len(most) == 16
    assert max(most) == 1


def test_a_trial_changes_no_text_of_other_threads():
    """It makes windows smaller while it lasts, of its own model alone, and between the steps of others."""
    config = MistralConfig(**_TINY | {"sliding_window": 8})
    models = [randomized(MistralForCausalLM(config)) for _ in range(2)]
    assert models[0].config is models[1].config is config
    ids = ids_of(30)
    expected = [engine.generate(model, ids, max_new_tokens=8).tokens for model in models]
    models[0].model.layers[0].register_forward_hook(lambda *_: time.sleep(0.02))
    generators, found = [engine.Generator(model) for model in models], []
    trial, errors = in_thread(lambda: generators[0].facts.why_not_cut)
    while trial.is_alive() or len(found) < 2:
        outs = [one.generate(ids, max_new_tokens=8) for one in reversed(generators)]
        found += [[out.tokens for out in reversed(outs)] == expected, outs[1].cache.log.read_by.mixed == ""]
    assert not errors
    assert all(found)
    assert config.sliding_window == 8


def test_every_product_takes_its_route(monkeypatch):
    """Whatever the other thread does meanwhile: else the same call computes differently from run to run."""
    model, taken = tiny_model("llama"), []
    routes = {name: noting(route, taken) for name, route in linear_routes.routes().items()}
    monkeypatch.setattr(linear_backend, "routes", lambda: routes)
    generator = engine.Generator(model, config=engine.EngineConfig(linears="onednn"))
    work = [in_thread(lambda: generator.generate(prompt(), max_new_tokens=8)) for _ in range(2)]
    for thread, errors in work:
        thread.join(30)
        assert not errors
    layers = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert len(taken) == 2 * 8 * layers


def noting(route, taken):
    return lambda *inputs: taken.append(0) or route(*inputs)


def test_a_stream_that_waits_keeps_no_one_waiting():
    generator = engine.Generator(tiny_model("llama"))
    stream = generator.stream(prompt(), max_new_tokens=6)
    pieces = [next(stream)]
    thread, errors = in_thread(lambda: generator.generate(prompt(), max_new_tokens=6))
    thread.join(30)
    assert not thread.is_alive()
    assert not errors
    pieces += stream
    assert len(pieces) == 12


def test_a_streamer_may_wait_for_another_call():
    generator = engine.Generator(tiny_model("llama"))
    expected = generator.generate(prompt(), max_new_tokens=3).tokens

    class Waits:
        def put(self, value):
            thread, errors = in_thread(lambda: generator.generate(prompt(), max_new_tokens=3))
            thread.join(30)
            assert not thread.is_alive()
            assert not errors

        def end(self):
            pass

    assert generator.generate(prompt(), max_new_tokens=3, streamer=Waits()).tokens == expected


def test_a_call_inside_of_a_step_is_no_deadlock():
    """A hook of the model may use the model."""
    model, made = tiny_model("llama"), []

    def hook(*_):
        if not made:
            made.append(None)
            made[0] = engine.generate(model, prompt(), max_new_tokens=3).tokens

    handle = hidden_layer(model).register_forward_hook(hook)
    try:
        whole = engine.generate(model, prompt(), max_new_tokens=3).tokens
    finally:
        handle.remove()
    assert made == [whole]


@pytest.mark.parametrize("drawn", [0, 1])
def test_random_numbers_of_others_do_not_come_twice(drawn, monkeypatch):
    """What was drawn for a token that is forgotten is taken back, unless others have drawn since."""
    monkeypatch.setattr("engine.decoding.token_buffer.reads_late", lambda device: True)
    generator = engine.Generator(tiny_model("llama"))
    torch.manual_seed(3)
    stream = generator.stream(prompt(rows=1, pads=0), max_new_tokens=20, do_sample=True)
    for _ in range(3):
        next(stream)
    others = [torch.rand(1) for _ in range(drawn)]
    state = torch.get_rng_state()
    out = stream.result()
    assert torch.equal(torch.get_rng_state(), state) == bool(others)
    assert len(out.tokens[0]) == 3


def test_the_statistics_of_a_device_are_left_alone(monkeypatch):
    allocated = {"now": 0, "most": 0}

    def allocate(count):
        allocated["now"] += count
        allocated["most"] = max(allocated["most"], allocated["now"])

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocated["most"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: pytest.fail("they are the user's"))
    allocate(100)
    peak = Peak(torch.device("cuda"))
    allocate(50)
    allocate(-50)
    assert peak.bytes == 150  # higher than ever: the device knows it
    later = Peak(torch.device("cuda"))
    allocate(-80)
    later.record()
    allocate(10)
    later.record()
    allocate(-20)
    assert later.bytes == 30
    assert Peak(torch.device("cpu")).bytes is None


def test_interleaved_runs_keep_the_frequencies_of_their_own_texts():
    """Dynamic RoPE keeps them in the model and changes them with the length of what it reads."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    sizes = {"max_position_embeddings": 16, "rope_parameters": rope, "num_hidden_layers": 2}
    model = randomized(LlamaForCausalLM(LlamaConfig(**_TINY | sizes)))
    prompts = [torch.arange(2, 2 + tokens)[None] for tokens in (12, 40, 20)]
    options = {"max_new_tokens": 12, "do_sample": False}
    alone = [copy.deepcopy(model).generate(ids, **options)[:, ids.shape[1] :].tolist() for ids in prompts]
    streams = [engine.stream(model, ids, max_new_tokens=12) for ids in prompts]
    for _ in range(12):
        for stream in streams:
            next(stream)
    assert [stream.result().tokens for stream in streams] == alone
    assert [engine.generate(model, ids, max_new_tokens=12).tokens for ids in prompts] == alone  # one after the other


def randomized(model):
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = None
    return model.eval()
