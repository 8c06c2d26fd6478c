"""Our caches in transformers' own loops, and transformers' caches in ours."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES, pairs, prompt, tiny_model
from helpers import cache_argument, new_cache
from transformers import DynamicCache, QuantizedCache, StaticCache

import caches
import engine
from caches.platform.transformers_api import follows_rows

pytestmark = pytest.mark.covering("values", "pairs")

NAMES = [*ARCHITECTURES, "mamba", "bamba", "lfm2", "falcon_h1", "zamba2"]
NEW = 14


def ours(names):
    return [pair for pair in pairs(names) if pair[1] != "none"]


@pytest.mark.parametrize(("name", "cache"), ours(NAMES))
def test_ours_in_transformers_generate(name, cache):
    model, inputs = tiny_model(name), prompt()
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    ours = new_cache(cache, model)
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **{cache_argument(model): ours})
    assert torch.equal(out, expected)
    assert ours.get_seq_length() == 13 + NEW - 1


@pytest.mark.parametrize(
    ("name", "cache"), ours(["llama", "mistral", "gemma2", "mamba2", "bamba", "lfm2", "falcon_h1"])
)
def test_ours_in_transformers_beam_search(name, cache):
    model, inputs = tiny_model(name), prompt()
    options = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 3}
    expected = model.generate(**inputs, **options)
    ours = {cache_argument(model): new_cache(cache, model)}
    assert torch.equal(model.generate(**inputs, **options, **ours), expected)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # of transformers 5.17
@pytest.mark.parametrize(
    "drafts", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": "llama"}], ids=["lookup", "draft"]
)
@pytest.mark.parametrize(("name", "cache"), ours(["llama", "mistral", "gemma2", "qwen3"]))
def test_ours_where_transformers_verifies_drafts(name, cache, drafts):
    """It takes back the end of a step that was longer than a window."""
    drafts = {key: tiny_model(value) if isinstance(value, str) else value for key, value in drafts.items()}
    model, ids = tiny_model(name), prompt(rows=1, tokens=22, pads=0)["input_ids"]
    ids[:, -8:] = ids[:, 4:12]  # so that there is something to look up
    options = {"max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, **drafts, past_key_values=new_cache(cache, model)), expected)


@pytest.mark.parametrize(
    "options", [{"backend": "kivi"}, {"backend": "quanto", "axis_key": -1, "axis_value": -1}, {}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_in_plain_calls_with_derivatives(options, dtype):
    """As without `torch.no_grad`, which notebooks leave out; rows are selected in the same way."""
    model = copy.deepcopy(tiny_model("llama")).to(dtype)
    ids, found = prompt(pads=0)["input_ids"], {}
    for grad in (True, False):
        cache = caches.build("quantized", model.config, residual_length=4, q_group_size=4, fused=False, **options)
        with torch.set_grad_enabled(grad):
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 0]))
            found[grad] = model(ids[:, :1], past_key_values=cache).logits.detach()
    assert torch.equal(found[True], found[False])


@pytest.mark.parametrize("cache", ["dynamic", "offloaded", "static", "quantized"])
def test_rows_are_selected_after_calls_with_derivatives(cache):
    model, ids = tiny_model("llama"), prompt(pads=0)["input_ids"]
    ours = new_cache(cache, model)
    model(ids, past_key_values=ours)
    ours.batch_select_indices([1, 1])
    with torch.no_grad():
        logits = model(ids[:1, :1].expand(2, 1), past_key_values=ours).logits
    assert torch.equal(logits[0], logits[1])


def test_tuples_stay_as_they_are():
    model, ids = tiny_model("llama"), prompt(pads=0)["input_ids"]
    cache = caches.build("dynamic", model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        kept = cache.to_legacy_cache()
        before = [part.clone() for layer in kept for part in layer]
        cache.crop(-6)
        model(ids[:, :6], past_key_values=cache)
    assert all(
        torch.equal(part, one) for part, one in zip([part for layer in kept for part in layer], before, strict=True)
    )


def test_the_length_without_a_limit_is_as_in_transformers():
    config = tiny_model("llama").config
    ours, theirs = caches.build("dynamic", config), DynamicCache(config=config)
    assert ours.get_max_length() == ours.get_max_cache_shape() == theirs.layers[0].get_max_length() == -1


@pytest.mark.parametrize(("name", "cache"), ours(NAMES))
def test_ours_in_plain_calls(name, cache):
    """The loop every tutorial shows: no begin, no settle, just `model(...)`."""
    model, inputs = tiny_model(name), prompt()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    ours, theirs = new_cache(cache, model), DynamicCache(config=model.config)
    step = ids
    with torch.no_grad():
        for _ in range(30):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -step.shape[1] :]
            arguments = {"input_ids": step, "attention_mask": mask, "position_ids": positions, "use_cache": True}
            expected = model(**arguments, past_key_values=theirs).logits[:, -1]
            logits = model(**arguments, past_key_values=ours).logits[:, -1]
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
            step = expected.argmax(-1, keepdim=True)
            mask = torch.cat([mask, torch.ones_like(step)], dim=1)


THEIRS = {
    "DynamicCache": lambda config: DynamicCache(config=config),
    "StaticCache": lambda config: StaticCache(config=config, max_cache_len=60),
}


@pytest.mark.parametrize("make", THEIRS.values(), ids=THEIRS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_theirs_in_ours(name, make):
    model, inputs = tiny_model(name), prompt()
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    theirs = make(model.config)
    out = engine.generate(model, inputs, past_key_values=theirs, max_new_tokens=NEW)
    assert torch.equal(out.sequences, expected)
    assert out.cache is theirs


def fail_at(step, model, patch):
    """Let the third layer of the model fail in its forward number `step`."""
    layer, calls = model.model.layers[2], []
    forward = layer.forward

    def fails(*args, **kwargs):
        calls.append(0)
        return 1 / 0 if len(calls) == step else forward(*args, **kwargs)

    patch.setattr(layer, "forward", fails)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("new_tokens", [2, 20])
def test_theirs_after_a_failed_step(name, new_tokens, monkeypatch):
    """What can be taken back is; what cannot is refused from then on, and the failure itself is what is reported."""
    model, inputs = tiny_model(name), prompt(tokens=5, pads=0)
    theirs = DynamicCache(config=model.config)
    with monkeypatch.context() as patch:
        fail_at(new_tokens, model, patch)
        with pytest.raises(engine.GenerationInterrupted, match="ZeroDivisionError") as failure:
            engine.generate(model, inputs, cache=theirs, max_new_tokens=30)
    part = failure.value.partial
    whole = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    assert torch.equal(part.sequences, whole[:, : 5 + new_tokens - 1])
    go_on = {"cache": part.cache, "max_new_tokens": 30 - new_tokens + 1}
    if name == "mistral" and new_tokens == 20:
        assert part.cache is None
        with pytest.raises(engine.GenerationInterrupted, match="could not be taken back"):
            engine.generate(model, whole[:, :25], cache=theirs, max_new_tokens=5)
    else:
        mask = torch.ones_like(part.sequences)
        assert torch.equal(engine.generate(model, part.sequences, attention_mask=mask, **go_on).sequences, whole)


# Quanto compiles an extension of its own on first use.
@pytest.fixture(params=[pytest.param("quanto", marks=pytest.mark.slow), "hqq", "fp8"])
def quantized(request):
    """Makes a quantized cache of transformers' for a model."""
    options = {} if request.param == "fp8" else {"q_group_size": 16, "residual_length": 8}
    axes = {"axis_key": 1, "axis_value": 1} if request.param == "hqq" else {}
    try:
        QuantizedCache(request.param, tiny_model("llama").config, **options, **axes)
    except ValueError:
        pytest.skip("not in this release of transformers")
    return lambda model: QuantizedCache(request.param, model.config, **options, **axes)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}],
    ids=str,
)
def test_their_quantized_caches_in_ours(quantized, arguments):
    model, inputs = tiny_model("llama"), prompt(1, tokens=8, pads=0)
    arguments = {"do_sample": False, "max_new_tokens": NEW} | arguments
    theirs = quantized(model)
    torch.manual_seed(0)
    if arguments.keys() & {"num_beams", "num_return_sequences"} and not follows_rows(theirs.layers[0]):
        with pytest.raises(engine.GenerationInterrupted, match="of this release of transformers reorders"):
            engine.generate(model, inputs, past_key_values=theirs, **arguments)
        return
    found = engine.generate(model, inputs, past_key_values=theirs, **arguments)
    torch.manual_seed(0)
    assert torch.equal(found.sequences, model.generate(**inputs, past_key_values=quantized(model), **arguments))
    if "num_beams" not in arguments:  # beams leave other rows than were returned, or none: codes are not taken back
        exact = engine.generate(model, inputs, past_key_values=DynamicCache(config=model.config), **arguments)
        assert 0.2 < found.stats.cache_bytes / exact.stats.cache_bytes < 0.7


@pytest.mark.parametrize("failing", range(2, NEW))
def test_their_quantized_caches_after_a_failed_step(quantized, failing, monkeypatch):
    """Also of one whose layers before the failing one had just encoded their exact tokens."""
    model, inputs = tiny_model("llama"), prompt(1, tokens=8, pads=0)
    options = {"do_sample": False, "past_key_values": quantized(model)}
    expected = model.generate(**inputs, **options | {"past_key_values": quantized(model)}, max_new_tokens=NEW)
    with monkeypatch.context() as patch:
        fail_at(failing, model, patch)
        with pytest.raises(engine.GenerationInterrupted, match="ZeroDivisionError") as failure:
            engine.generate(model, inputs, **options, max_new_tokens=NEW)
    part = failure.value.partial
    assert torch.equal(part.sequences, expected[:, : 8 + failing - 1])
    mask = torch.ones_like(part.sequences)
    out = engine.generate(
        model, part.sequences, attention_mask=mask, cache=part.cache, max_new_tokens=NEW - failing + 1
    )
    assert torch.equal(out.sequences, expected)


def test_one_prefix_many_prompts():
    model = tiny_model("llama")
    prefix = prompt(rows=1, pads=0)["input_ids"]
    cache = caches.build("static", model.config, max_cache_len=40)
    with torch.no_grad():
        cache = model(prefix, past_key_values=cache).past_key_values
    for seed in (1, 2):
        ids = torch.cat([prefix, prompt(rows=1, tokens=5, pads=0, seed=seed)["input_ids"]], dim=1)
        options = {"max_new_tokens": 8, "do_sample": False}
        expected = model.generate(ids, **options)
        assert torch.equal(model.generate(ids, **options, past_key_values=copy.deepcopy(cache)), expected)
        assert torch.equal(engine.generate(model, ids, **options, cache=copy.deepcopy(cache)).sequences, expected)
    assert cache.get_seq_length() == 13
