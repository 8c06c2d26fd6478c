"""What a cache was computed with: every change of a model is noticed, and what it does while it computes is none."""

import copy
import gc
import pickle
from types import SimpleNamespace

import peft
import pytest
import torch
from architectures import ARCHITECTURES, MORE_ARCHITECTURES, RARE_ARCHITECTURES, randomised, tiny_model
from torch import nn

from caches.layers import fingerprint as fingerprints
from caches.layers.fingerprint import differences, fingerprint
from caches.layers.model_version import model_version
from caches.layers.read_by import ReadBy
from engine.kernels.weight_conversion import convert_linears

_LLAMA = ARCHITECTURES["llama"][1]
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0,
         "rope_theta": 10_000.0, "original_max_position_embeddings": 32}  # fmt: skip
_XGLM = {"vocab_size": 101, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4,
         "max_position_embeddings": 32}  # fmt: skip
_RECURRENT = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "lru_width": 32,
              "num_attention_heads": 4, "num_key_value_heads": 1, "attention_window_size": 16}  # fmt: skip
CHANGE_AS_THEY_COMPUTE = {
    "dynamic": ("LlamaConfig", _LLAMA | {"max_position_embeddings": 32, "rope_parameters": _DYNAMIC}),
    "longrope": ("LlamaConfig", _LLAMA | {"max_position_embeddings": 64, "rope_parameters": _LONG}),
    "a table that grows": ("XGLMConfig", _XGLM),
    "states on modules": ("RecurrentGemmaConfig", _RECURRENT),
}


def llama():
    return copy.deepcopy(tiny_model("llama"))


def weight_of(model):
    return model.model.layers[1].mlp.up_proj.weight


def in_place(model):
    with torch.no_grad():
        weight_of(model)[3, 5] += 1


def one_row_of_the_embeddings(model):
    with torch.no_grad():
        model.model.embed_tokens.weight[7].zero_()


def through_data(model):
    weight_of(model).data.mul_(1.01)


def through_numpy(model):
    content = weight_of(model).detach().numpy()
    content *= 1.01


def data_replaced(model):
    weight_of(model).data = weight_of(model).data * 1.01


def parameter_replaced(model):
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight_of(model).detach().clone())


def layer_replaced(model):
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[1].mlp)


def loaded(model):
    model.load_state_dict(model.state_dict())


def loaded_in_place_of_them(model):
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def cast(model):
    model.half()


def low_bit(model):
    convert_linears(model, "int8")


def frequencies(model):
    model.model.rotary_emb.inv_freq.data[-1] *= 2


def epsilon(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


def scale(model):
    model.model.rotary_emb.attention_scaling = 1.5


def activation(model):
    model.model.layers[1].mlp.act_fn = nn.Tanh()


def layer_types(model):
    model.config.layer_types = ["sliding_attention"] * 4
    model.config.sliding_window = 3


CHANGES = {
    "weights were written or replaced": [
        in_place, one_row_of_the_embeddings, through_data, through_numpy, data_replaced, parameter_replaced,
        layer_replaced, loaded, loaded_in_place_of_them, cast, low_bit,
    ],
    "buffers that are not saved": [frequencies],
    "settings of modules": [epsilon, scale],
    "modules were replaced": [activation],
    "the configuration says something else of the layers": [layer_types],
}  # fmt: skip
UNSEEN_BY_CONTENT = {parameter_replaced, layer_replaced, loaded, loaded_in_place_of_them}  # all has the same values


@pytest.mark.parametrize(
    ("change", "reason"), [(change, reason) for reason, changes in CHANGES.items() for change in changes],
    ids=lambda one: getattr(one, "__name__", "")
)  # fmt: skip
def test_every_change_is_noticed(change, reason):
    model = llama()
    before, saved = ReadBy.of(model), fingerprint(model)
    assert before.why_other(ReadBy.of(model)) is None
    change(model)
    now = ReadBy.of(model)
    assert reason in before.why_other(now)
    assert before.until(now).why_other(now) == f"while it was filled, {before.version.difference(now.version)}"
    assert (differences(saved, fingerprint(model)) == "") == (change in UNSEEN_BY_CONTENT)


def nothing(model):
    pass


def training(model):
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.eval()
    model.requires_grad_(False)


def backward(model):
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()


def generation_config(model):
    model.generation_config.max_new_tokens = 5
    model.config.use_cache = False


def recorded(model):
    """transformers leaves its hooks there."""
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True, output_attentions=True)


@pytest.mark.parametrize("change", [nothing, training, backward, generation_config, recorded])
def test_what_changes_no_key_is_no_change(change):
    model = llama()
    before, saved = ReadBy.of(model), fingerprint(model)
    change(model)
    fingerprints._latest.clear()
    assert before == ReadBy.of(model)
    assert fingerprint(model) == saved


def test_dropout_counts_while_it_is_active():
    model = randomised("LlamaConfig", _LLAMA | {"attention_dropout": 0.5})
    before, saved = ReadBy.of(model), fingerprint(model)
    model.train()
    assert "settings of modules" in before.why_other(ReadBy.of(model))
    assert "settings" in differences(saved, fingerprint(model))
    model.eval()
    assert before.why_other(ReadBy.of(model)) is None


def lora():
    targets = ["q_proj", "embed_tokens"]
    return peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=0.1)


def anew(wrapper):
    wrapper.delete_adapter("default")
    wrapper.add_adapter("default", lora())
    wrapper.set_adapter("default")


def set_state(wrapper):
    state = peft.get_peft_model_state_dict(wrapper, save_embedding_layers=False)
    peft.set_peft_model_state_dict(wrapper, {name: tensor + 1 for name, tensor in state.items()})


def other_scale(wrapper):
    wrapper.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 3)


def other_active(wrapper):
    wrapper.add_adapter("other", lora())
    wrapper.set_adapter("other")


@pytest.mark.parametrize(
    ("change", "reason"),
    [(anew, "weights"), (set_state, "weights"), (other_scale, "adapters"), (other_active, "adapters"),
     (lambda wrapper: wrapper.merge_adapter(), "adapters"), (lambda wrapper: wrapper.unload(), "adapters"),
     (lambda wrapper: wrapper.base_model.disable_adapter_layers(), "adapters")],
)  # fmt: skip
def test_adapters(change, reason):
    wrapper = peft.get_peft_model(llama(), lora()).eval()
    before = ReadBy.of(wrapper)
    change(wrapper)
    wrapper.eval()
    assert reason in before.why_other(ReadBy.of(wrapper))


def test_scales_of_single_layers():
    wrapper = peft.get_peft_model(llama(), lora()).eval()
    first, second, third, *_ = [layer.self_attn.q_proj for layer in wrapper.base_model.model.model.layers]
    first.set_scale("default", 2)
    second.set_scale("default", 3)
    before, saved = ReadBy.of(wrapper), fingerprint(wrapper)
    third.set_scale("default", 2)
    fourth = ReadBy.of(wrapper)
    assert "adapters" not in before.why_other(fourth)
    assert "settings of modules" in before.why_other(fourth)
    assert "settings" in differences(saved, fingerprint(wrapper))


def test_adapters_that_are_not_active_do_not_count():
    wrapper = peft.get_peft_model(llama(), lora()).eval()
    before, saved = ReadBy.of(wrapper), fingerprint(wrapper)
    wrapper.add_adapter("other", lora())
    wrapper.eval()
    for name, parameter in wrapper.named_parameters():
        if "other" in name:
            parameter.data.add_(1)
    fingerprints._latest.clear()
    assert before == ReadBy.of(wrapper)
    assert fingerprint(wrapper) == saved
    with wrapper.disable_adapter():
        assert before != ReadBy.of(wrapper)
    assert before == ReadBy.of(wrapper)


def stays_the_same(model):
    """While it reads a short text, a long one and a short one."""
    before, saved = model_version(model), fingerprint(model)
    for tokens in (5, 100, 5):
        ids = torch.randint(2, 90, (1, tokens))
        inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            model(ids, **inputs)
        fingerprints._latest.clear()
        assert before.difference(model_version(model)) is None
        assert fingerprint(model) == saved
    assert fingerprint(copy.deepcopy(model)) == saved


@pytest.mark.parametrize("name", CHANGE_AS_THEY_COMPUTE)
def test_what_a_model_changes_while_it_computes_is_no_change(name):
    stays_the_same(randomised(*CHANGE_AS_THEY_COMPUTE[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ARCHITECTURES | MORE_ARCHITECTURES | RARE_ARCHITECTURES))
def test_no_architecture_changes_while_it_computes(name):
    try:
        model = tiny_model(name)
    except AttributeError:
        pytest.skip("this release of transformers does not know it")
    stays_the_same(copy.deepcopy(model))


def test_the_frequencies_of_dynamic_rope_that_a_run_begins_with_count():
    model = randomised(*CHANGE_AS_THEY_COMPUTE["dynamic"])
    before = ReadBy.of(model)
    model.model.rotary_emb.original_inv_freq.mul_(2)
    assert "buffers" in before.why_other(ReadBy.of(model))


@pytest.mark.parametrize("make", [
    lambda: torch.zeros(0), lambda: torch.zeros(5).expand(3, 5), lambda: torch.arange(24.0).view(4, 6).T,
    lambda: torch.zeros(9, 7)[:, 1:4], lambda: torch.zeros(4, dtype=torch.bool), lambda: torch.zeros(3, device="meta"),
    lambda: torch.zeros(3, dtype=torch.complex64), lambda: torch.zeros(3).to(torch.float8_e4m3fn),
    lambda: torch.zeros(3).to_sparse(), lambda: torch.tensor(1.0), lambda: _freed(torch.zeros(100)),
])  # fmt: skip
def test_tensors_of_every_kind_are_read(make):
    model = llama()
    model.register_buffer("saved", make())
    model.register_buffer("unsaved", make(), persistent=False)
    with torch.inference_mode():
        model.register_buffer("of_inference", torch.ones(3))
    before = model_version(model)
    assert model_version(model) is before
    assert fingerprint(model) == fingerprint(model)
    model.of_inference = torch.zeros(3)
    assert model_version(model) != before


def _freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def test_weights_are_not_kept():
    model = llama()
    read_by, weight = ReadBy.of(model), weight_of(model)
    freed = torch.zeros(0).untyped_storage()
    before = weight.untyped_storage()
    weight.untyped_storage().resize_(0)  # as frameworks do that train and generate in turn
    assert "weights" in read_by.why_other(ReadBy.of(model))
    assert before.nbytes() == freed.nbytes()
    del model, weight
    gc.collect()
    assert read_by.live_model is None
    assert read_by.why_other(ReadBy.of(tiny_model("llama"))) == "the model that has filled it was freed"


def test_offloaded_weights_count_by_their_names_alone():
    """accelerate brings them in while a layer computes."""
    model = llama()
    layer = model.model.layers[1].mlp.up_proj
    layer._hf_hook = SimpleNamespace(offload=True)
    before = model_version(model)
    layer.weight = nn.Parameter(torch.empty_like(layer.weight, device="meta"))
    assert model_version(model) == before


def test_in_a_pickle_a_model_is_its_fingerprint():
    model = llama()
    read_by = ReadBy.of(model)
    again = pickle.loads(pickle.dumps(read_by))
    assert again.reader is again.version is None
    assert again.why_other(read_by) is again.why_other(ReadBy.of(llama())) is None
    assert pickle.loads(pickle.dumps(again)) == again
    in_place(model)
    assert again.why_other(ReadBy.of(model)) == "another model has filled it (weights: others)"
    assert "weights were written" in pickle.loads(pickle.dumps(read_by)).why_other(ReadBy.of(model))
    del model
    gc.collect()
    assert "was freed" in pickle.loads(pickle.dumps(read_by)).why_other(ReadBy.of(llama()))


def test_rows_of_several_caches():
    model = llama()
    first = ReadBy.of(model)
    epsilon(model)
    second = ReadBy.of(model)
    assert ReadBy.joined([second, second]) == second
    assert ReadBy.joined([second, None]) is ReadBy.joined([None]) is None
    assert "between which settings of modules" in ReadBy.joined([second, first]).why_other(second)
    assert "of different models" in ReadBy.joined([second, ReadBy.of(llama())]).why_other(second)
