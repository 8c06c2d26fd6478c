"""Caches in files: what is damaged or of another model is refused. Every backend: test_pickled.py."""

import copy
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time

import pytest
import torch
from architectures import prompt, tiny_model
from kept import NEW
from places import ROOT
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import caches
import engine
from caches import files
from caches.core.layer import Layer
from caches.layers.fingerprint import fingerprint
from configs import ConfigError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "conversation.safetensors"


def check_goes_on(model, first, path):
    """A loaded cache gives the text that the cache itself gives."""
    first.cache.save(path)
    found = engine.generate(model, first.sequences, cache=caches.load(path, model), max_new_tokens=NEW)
    assert found.stats.cache == first.cache.name
    expected = engine.generate(model, first.sequences, cache=first.cache, max_new_tokens=NEW)
    assert found.stats.prompt_tokens == expected.stats.prompt_tokens
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize("cache", ["dynamic", "quantized", "offloaded"])
def test_rows_that_share_a_prefix(cache, path):
    model, options = tiny_model("llama"), {"residual_length": 2} if cache == "quantized" else {}
    many = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": NEW}
    first = engine.generate(model, prompt(rows=1, tokens=40, pads=0), cache=cache, cache_config=options, **many)
    first.cache.save(path)
    kept = sum(tensor.nbytes for layer in first.cache.layers for tensor in layer.tensors())
    assert path.stat().st_size < kept + 20_000  # the prefix once
    assert caches.load(path, model).shares == first.cache.shares
    check_goes_on(model, first, path)


@pytest.fixture
def saved(path):
    model = tiny_model("llama")
    out = engine.generate(model, prompt(rows=1, tokens=6, pads=0), max_new_tokens=2)
    out.cache.save(path)
    return model, out


def test_rows_that_were_joined(path):
    """A fixed cache has room for the rows of all parts, in the file too."""
    model = tiny_model("llama")
    run = {"cache": "static", "do_sample": True, "num_return_sequences": 2, "max_new_tokens": NEW}
    parts = [engine.generate(model, prompt(rows=1, pads=0), **run, seed=seed).cache for seed in (0, 1)]
    joined = caches.join_rows(parts)
    joined.save(path)
    found = caches.load(path, model)
    assert (found.batch_size, found.max_rows) == (4, 4)
    assert torch.equal(found.layers[2].keys, joined.layers[2].keys)


def test_a_file_may_be_read_by_whom_the_folder_says_and_links_stay(saved, path):
    _, out = saved
    mask = os.umask(0o027)
    try:
        path.unlink()
        out.cache.save(path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    link = path.with_name("link")
    link.symlink_to(path)
    out.cache.save(link)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert [one.name for one in path.parent.iterdir() if one.name.startswith(".")] == []


@pytest.mark.parametrize("device", ["foo", "cuda"] if not torch.cuda.is_available() else ["foo"])
def test_a_device_that_is_not_here(device, saved, path):
    with pytest.raises(ConfigError, match=f"device='{device}' is not here"):
        caches.load(path, saved[0], device=device)


def test_what_a_file_says(saved, path):
    found = caches.inspect(path)
    assert (found.backend, found.rows, found.total_tokens, found.layers) == ("dynamic", 1, 7, 4)
    assert (found.path, found.bytes) == (path, path.stat().st_size)
    assert found.model["model"] == "LlamaForCausalLM"


def test_layers_are_written_and_read_one_after_the_other(path, monkeypatch):
    """All of those of an offloaded cache may not fit onto the device at once."""
    model, events = tiny_model("llama"), []
    out = engine.generate(model, prompt(rows=1, pads=0), cache="offloaded", max_new_tokens=2)
    state_of, load, unpack, pack = Layer.state_dict, Layer.load_state_dict, files._unpacked, files._packed

    def noted(event, function):
        return lambda *given, **more: events.append(event) or function(*given, **more)

    monkeypatch.setattr(Layer, "state_dict", noted("state", state_of))
    monkeypatch.setattr(Layer, "load_state_dict", noted("load", load))
    monkeypatch.setattr(files, "_packed", lambda value, *more: (
        events.append("packed") if isinstance(value, torch.Tensor) else None) or pack(value, *more))  # fmt: skip
    monkeypatch.setattr(files, "_unpacked", lambda value, *given, **more: (
        events.append("read") if isinstance(value, dict) and "tensor" in value else None
    ) or unpack(value, *given, **more))  # fmt: skip
    out.cache.save(path)
    assert events.index("packed") < len(events) - 1 - events[::-1].index("state")
    caches.load(path, model)
    assert events.index("load") < len(events) - 1 - events[::-1].index("read")


def test_into_another_backend(saved, path):
    model, out = saved
    for name, options in {
        "static": {"max_cache_len": 64},
        "offloaded": {},
        "quantized": {"residual_length": 2},
    }.items():
        cache = caches.load(path, model, cache=name, **options)
        assert (cache.name, cache.total_tokens) == (name, 7)
        assert torch.equal(cache.log.ids, out.sequences[:, :7])
    fixed = caches.load(path, model, cache="static", max_cache_len=64)
    expected = engine.generate(model, out.sequences, max_new_tokens=NEW).sequences
    assert torch.equal(engine.generate(model, out.sequences, cache=fixed, max_new_tokens=NEW).sequences, expected)
    with pytest.raises(ConfigError, match=r"max_cache_len: options are for another backend.*cache="):
        caches.load(path, model, max_cache_len=64)


def test_devices_are_those_of_the_machine_that_loads(path):
    model, expected = tiny_model("llama"), {"device": "cpu", "layer_device_map": {"1": "cpu"}}
    out = engine.generate(model, prompt(tokens=14), cache="dynamic", cache_config=expected, max_new_tokens=NEW)
    check_goes_on(model, out, path)
    assert not expected.keys() & caches.inspect(path).options.keys()
    elsewhere = caches.load(path, model, device="meta")
    elsewhere.begin(1)
    for index, layer in enumerate(elsewhere.layers):
        new = torch.empty_like(layer.keys[:, :, :1])
        assert elsewhere.update(new, new, index)[0].is_meta


def test_another_model_is_refused_with_what_differs(saved, path):
    other = copy.deepcopy(saved[0])
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight.mul_(1.01)
    with pytest.raises(caches.CacheFileError, match=r"of another model \(weights: others\)"):
        caches.load(path, other)
    with pytest.raises(caches.CacheFileError, match=r"dtype: float32, here float64"):
        caches.load(path, copy.deepcopy(saved[0]).double())
    with pytest.raises(caches.CacheFileError, match=r"model: LlamaForCausalLM, here MistralForCausalLM"):
        caches.load(path, tiny_model("mistral"))
    turned = copy.deepcopy(saved[0])
    turned.config.rope_parameters = {"rope_type": "default", "rope_theta": 123.0}
    with pytest.raises(caches.CacheFileError, match=r"rope: .*10000.*, here .*123"):
        caches.load(path, turned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_element_of_any_weight_tells_models_apart(dtype):
    model = copy.deepcopy(tiny_model("llama")).to(dtype)
    known = {fingerprint(model)["weights"]}
    for number, weight in enumerate(model.parameters()):
        with torch.no_grad():
            element = weight.view(-1)[number * 31 % weight.numel()]
            element.neg_()
            known.add(fingerprint(model)["weights"])
            element.neg_()
            if weight.ndim > 1:
                weight[[0, -1]] = weight[[-1, 0]]
                known.add(fingerprint(model)["weights"])
                weight[[0, -1]] = weight[[-1, 0]]
    matrices = sum(weight.ndim > 1 for weight in model.parameters())
    assert len(known) == 1 + len(list(model.parameters())) + matrices


def test_adapters_belong_to_the_model():
    pytest.importorskip("peft")

    class Adapted(nn.Module):
        active_adapters, disable_adapters = ["legal"], False

    model = copy.deepcopy(tiny_model("llama"))
    before = fingerprint(model)
    model.model.layers[0].adapter = Adapted()
    assert (before["adapters"], fingerprint(model)["adapters"]) == ("none", "legal")
    model.model.layers[0].adapter.disable_adapters = True
    assert fingerprint(model)["adapters"] == "none"
    before = fingerprint(model)
    assert fingerprint(nn.ModuleDict({"inner": model})) == before


def test_every_damage_is_found(saved, path):
    whole = path.read_bytes()
    checked = [*range(0, len(whole), 1 + len(whole) // 4000), *range(len(whole) - 40, len(whole)), *range(16)]
    for at in checked:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(caches.CacheFileError, match="damaged"):
            caches.inspect(path)
    path.write_bytes(whole)
    caches.inspect(path)


@pytest.mark.slow
def test_every_flipped_byte_and_every_truncation(saved, path):
    whole = path.read_bytes()
    for at in range(len(whole)):
        for content in (whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :], whole[:at]):
            path.write_bytes(content)
            with pytest.raises(caches.CacheFileError, match="damaged"):
                caches.load(path, saved[0])


def test_other_files_are_refused(path, tmp_path):
    model = tiny_model("llama")
    for content in (b"", b"{}", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(caches.CacheFileError, match="no saved cache, or damaged"):
            caches.load(path, model)
    save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(caches.CacheFileError, match="no saved cache"):
        caches.load(path, model)
    with pytest.raises(FileNotFoundError):
        caches.load(tmp_path / "nothing", model)


def test_what_cannot_be_saved_is_said(path):
    model = tiny_model("llama")
    cache = caches.build("dynamic", model.config)
    ids = prompt(rows=1, pads=0)["input_ids"]
    expected = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    with pytest.raises(caches.CacheFileError, match="which model filled this cache is not known"):
        cache.save(path)
    cache.save(path, model)
    loaded = caches.load(path, model)  # whose tokens are not known: they are compared
    again = engine.generate(model, expected, cache=loaded, max_new_tokens=3)
    assert again.stats.prompt_tokens == 1
    with pytest.raises(engine.InputError, match="do not begin this prompt"):
        engine.generate(model, expected.flip(1), cache=caches.load(path, model), max_new_tokens=3)


def test_a_cache_that_found_its_layers_itself(path):
    model, cache = tiny_model("llama"), caches.DynamicCache()
    out = engine.generate(model, prompt(pads=0, seed=2), cache=cache, max_new_tokens=NEW)
    check_goes_on(model, out, path)


KILLED = """
import os, sys, torch, caches, signal
from caches import files
sys.path[:0] = [{support!r}]
from architectures import prompt, tiny_model
import engine
out = engine.generate(tiny_model("llama"), prompt(), max_new_tokens=9)
write = files.save_file
def slowly(*given):
    write(*given)
    print("written", flush=True)
    signal.pause()
files.save_file = slowly
out.cache.save(sys.argv[1])
"""


@pytest.mark.slow  # a process that imports everything
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_the_old_file_stands_when_the_process_is_killed(saved, path):
    before = path.read_bytes()
    code = KILLED.format(support=str(ROOT / "tests" / "support"))
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert path.read_bytes() == before
    assert caches.load(path, saved[0]).total_tokens == 7


@pytest.mark.parametrize(("place", "error", "says"), [
    ((os, "replace"), OSError("the disk is full"), "the disk is full"),
    ((files, "save_file"), SafetensorError("I/O error: No space left on device (os error 28)"),
     r"No space left.* needs [\d,]+ bytes, where [\d,]+ are free"),
    ((files, "save_file"), SafetensorError("a header that is too large"), "too large"),
], ids=str)  # fmt: skip
def test_a_failure_leaves_no_file(place, error, says, saved, path, monkeypatch):
    """With what the file needs: safetensors says no more than the number of the system's error."""
    before = path.read_bytes()

    def fail(*_):
        raise error

    monkeypatch.setattr(*place, fail)
    kind = caches.CacheFileError if says == "too large" else OSError
    with pytest.raises(kind, match=says) as raised:
        saved[1].cache.save(path)
    assert "needs" not in says or raised.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_another_version_of_the_format_is_refused(saved, path, monkeypatch):
    monkeypatch.setattr("configs.cache_file.VERSION", 6)
    with pytest.raises(caches.CacheFileError, match="has version 5 of the format, and this release reads 6"):
        caches.load(path, saved[0])


def test_nothing_is_unpickled(saved, path):
    header = json.loads(path.read_bytes()[8:].split(b"\0", 1)[0].rsplit(b"}", 1)[0] + b"}")
    assert set(json.loads(header["__metadata__"]["kvengine"])) == {
        "version",
        "backends",
        "model",
        "notes",
        "stacks",
        "tokens",
    }
    assert b"pickle" not in path.read_bytes()


@pytest.mark.slow
def test_loading_takes_a_twentieth_of_reading(path):
    """4,096 tokens of a model of 21 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=1000, hidden_size=512, intermediate_size=1400, num_hidden_layers=6,
                         num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=8192,
                         eos_token_id=None)  # fmt: skip
    generator = engine.Generator(LlamaForCausalLM(config).eval())
    ids = torch.randint(3, 1000, (1, 4096))
    out = generator.generate(ids, max_new_tokens=1)
    out.cache.save(path)
    begun = time.perf_counter()
    loaded = caches.load(path, generator.model)
    seconds = time.perf_counter() - begun
    assert seconds < 0.05 * out.stats.ttft_s
    assert loaded.total_tokens == 4096
    content = sum(pair.nbytes for layer in loaded for pair in layer)
    assert path.stat().st_size < 1.02 * content
