"""What encoders are given besides ids, and what of theirs comes back, as in transformers."""

import pytest
import torch
from encoder_decoders import source, tiny_encoder_decoder
from transformers.modeling_outputs import BaseModelOutput

import engine

NEW = 8
NAMES = ["t5", "bart"]
HOW = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "drawn": {"do_sample": True, "num_return_sequences": 2},
    "drawn beams": {"num_beams": 3, "do_sample": True},
}


def theirs(model, inputs, **options):
    torch.manual_seed(3)
    return model.generate(**inputs, **({"max_new_tokens": NEW, "do_sample": False} | options))


def ours(model, inputs=None, **options):
    torch.manual_seed(3)
    return engine.generate(model, inputs, **({"max_new_tokens": NEW} | options))


def embedded(model, name):
    """Embeddings that are those of no ids, and the mask of the source."""
    inputs = source(name)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    return {"inputs_embeds": embeds * 0.9 + 0.3 * embeds.flip(1), "attention_mask": inputs["attention_mask"]}


@pytest.mark.covering("values")
@pytest.mark.parametrize("options", HOW.values(), ids=HOW)
@pytest.mark.parametrize("name", NAMES)
def test_embeddings_in_the_mapping_or_as_a_keyword(name, options):
    model = tiny_encoder_decoder(name)
    inputs = embedded(model, name)
    expected = theirs(model, inputs, **options)
    assert not torch.equal(expected, theirs(model, source(name), **options))
    assert torch.equal(ours(model, inputs, **options).sequences, expected)
    assert torch.equal(ours(model, **inputs, **options).sequences, expected)
    mask = {"attention_mask": inputs["attention_mask"]}
    assert torch.equal(ours(model, mask, inputs_embeds=inputs["inputs_embeds"], **options).sequences, expected)
    without = {"inputs_embeds": inputs["inputs_embeds"]}
    assert torch.equal(ours(model, without, **options).sequences, theirs(model, without, **options))


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_beside_ids_are_refused_as_in_transformers(name):
    model, both = tiny_encoder_decoder(name), {}
    both = source(name) | embedded(model, name)
    with pytest.raises(ValueError, match="Please pick one"):
        theirs(model, both)
    for arguments in ((both, {}), (None, both), (source(name), {"inputs_embeds": both["inputs_embeds"]})):
        with pytest.raises(engine.InputError, match="Please pick one"):
            ours(model, arguments[0], **arguments[1])


@pytest.mark.parametrize("name", NAMES)
def test_without_a_source_the_encoder_reads_bos(name):
    model = tiny_encoder_decoder(name)
    for inputs in ({}, {"decoder_input_ids": torch.tensor([[2, 5], [2, 6]])}):
        expected = theirs(model, inputs)
        assert torch.equal(ours(model, inputs).sequences, expected)
        assert torch.equal(ours(model, **inputs).sequences, expected)
    bos = {"input_ids": torch.tensor([[model.generation_config.bos_token_id]])}
    assert torch.equal(ours(model).sequences, theirs(model, bos))
    assert not torch.equal(ours(model).sequences, theirs(model, {"input_ids": torch.tensor([[50]])}))
    model.generation_config.bos_token_id = None
    try:
        with pytest.raises(engine.InputError, match="bos_token_id"):
            ours(model)
    finally:
        model.generation_config.bos_token_id = 1


@pytest.mark.parametrize("name", NAMES)
def test_outputs_of_the_encoder_in_the_mapping_and_as_a_tuple(name):
    model, inputs = tiny_encoder_decoder(name), source(name)
    outputs = model.get_encoder()(**inputs)
    mask = {"attention_mask": inputs["attention_mask"]}
    expected = theirs(model, inputs)
    for form in (outputs, outputs.to_tuple(), BaseModelOutput(outputs[0])):
        given = {"encoder_outputs": form} | mask
        assert torch.equal(ours(model, given).sequences, expected)
        assert torch.equal(ours(model, **given).sequences, expected)
    assert torch.equal(ours(model, inputs, encoder_outputs=outputs).sequences, expected)


@pytest.mark.parametrize("name", NAMES)
def test_ragged_ids_are_padded_on_the_right(name):
    model, rows = tiny_encoder_decoder(name), [[5, 6, 7, 8], [9, 10]]
    padded = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])}
    expected = theirs(model, padded, attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))
    assert not torch.equal(expected, theirs(model, padded))
    for form in (rows, [torch.tensor(row) for row in rows], {"input_ids": rows, "attention_mask": [[1] * 4, [1] * 2]}):
        assert torch.equal(ours(model, form).sequences, expected)


def test_when_nothing_of_the_encoder_comes_back():
    model, inputs = tiny_encoder_decoder("bart"), source("bart")
    states = ours(model, inputs, output_hidden_states=True)
    assert states.encoder_attentions is None
    assert len(states.encoder_hidden_states) == 3
    plain = ours(model, inputs)
    assert plain.encoder_attentions is plain.encoder_hidden_states is None
    mask, asked = {"attention_mask": inputs["attention_mask"]}, {"return_dict_in_generate": True}
    for had in (False, True):  # what was given holds it, or not
        given = {"encoder_outputs": model.get_encoder()(**inputs, output_hidden_states=had)} | mask
        for wanted in (False, True):
            asked["output_hidden_states"] = wanted
            for out in (theirs(model, given, **asked), ours(model, given, **asked)):
                assert (out.encoder_hidden_states is not None) == (had and wanted)


def test_features_in_any_form():
    model, features = tiny_encoder_decoder("whisper"), source("whisper")["input_features"]
    expected = theirs(model, {"input_features": features})
    for form in (features, features.numpy(), features.double().numpy(), features.tolist()):
        for out in (ours(model, form), ours(model, input_features=form)):
            assert torch.equal(out.sequences[:, 1:], expected)  # whisper's own generate leaves out what it began with


def test_wrong_features():
    model, features = tiny_encoder_decoder("whisper"), source("whisper")["input_features"]
    wrong = {
        "rectangular array of numbers": ("hello", object(), [[1], [1, 2]], b"x"),
        r"shape \[\], but the encoder reads": (5, torch.tensor(1.0)),
        r"\(float32\) cannot read input_features \[16, 24\] of float32: ": (features[0],),
        r"cannot read input_features \[2, 7, 24\]": (features[:, :7], features[:, :7].numpy()),
        r"cannot read input_features \[2, 16, 9\] of float32: ValueError: Whisper expects": (features[..., :9],),
        r"of float16: RuntimeError": (features.half(),),
        r"of int64: ": (features.long(),),
    }
    for message, forms in wrong.items():
        for form in forms:
            with pytest.raises(engine.InputError, match=message):
                ours(model, form)


@pytest.mark.parametrize("name", [*NAMES, "whisper"])
def test_wrong_outputs_of_the_encoder(name):
    model, states = tiny_encoder_decoder(name), torch.rand(2, 13, 32)
    wrong = {
        r"shape \[2, 13, 7\], .*\[rows, columns, 32\]": {"encoder_outputs": (states[..., :7],)},
        r"shape \[2, 13\]": {"encoder_outputs": (states[..., 0],)},
        r"shape \[2, 0, 32\]": {"encoder_outputs": (states[:, :0],)},
        "torch.float16, but the model computes in torch.float32": {"encoder_outputs": (states.half(),)},
        "torch.int64, but": {"encoder_outputs": (states.long(),)},
        r"attention_mask has shape \[3, 13\]": {"encoder_outputs": (states,), "attention_mask": torch.ones(3, 13)},
        r"attention_mask has shape \[1, 13\]": {"encoder_outputs": (states,), "attention_mask": torch.ones(1, 13)},
    }
    if name != "whisper":
        mask = {"attention_mask": torch.ones(2, 9)}
        wrong[r"shape \[2, 9\], but encoder_outputs have \[2, 13\]"] = {"encoder_outputs": (states,)} | mask
        one_row = {"input_ids": source(name)["input_ids"][:1]}
        wrong["encoder_outputs have 2 rows, but input_ids have 1"] = {"encoder_outputs": (states,)} | one_row
    for message, given in wrong.items():
        with pytest.raises(engine.InputError, match=message):
            ours(model, given)
    assert ours(model, encoder_outputs=(states,), attention_mask=torch.ones(2, 13)).sequences.shape == (2, 1 + NEW)


def test_wrong_sources():
    model, inputs = tiny_encoder_decoder("bart"), source("bart")
    wrong = {
        r"inputs_embeds have shape \[2, 5, 7\].* reads \[rows, columns, 32\]": {"inputs_embeds": torch.ones(2, 5, 7)},
        "floating-point tensor": {"inputs_embeds": torch.ones(2, 5)},
        r"shape \[2, 13\], but input_ids have \[2, 1\]": {"attention_mask": inputs["attention_mask"]},
        r"shape \[2, 12\], but input_ids have \[2, 13\]": inputs | {"attention_mask": torch.ones(2, 12)},
        "1 rows, but input_ids have 2": inputs | {"decoder_input_ids": torch.tensor([[2, 5]])},
        "decoder_input_ids are a rectangular array": inputs | {"decoder_input_ids": [[2, 5], [2]]},
        "not a Tensor without": {"encoder_outputs": torch.ones(2, 5, 32)},
        "not a tuple without": {"encoder_outputs": ()},
    }
    for message, given in wrong.items():
        with pytest.raises(engine.InputError, match=message):
            ours(model, given)
        with pytest.raises(engine.InputError, match=message):
            ours(model, **given)
    with pytest.raises(engine.InputError, match="input_ids given twice"):
        ours(model, inputs["input_ids"], input_ids=inputs["input_ids"])
    start = model.generation_config.decoder_start_token_id
    model.generation_config.decoder_start_token_id = model.generation_config.bos_token_id = None
    try:
        with pytest.raises(engine.InputError, match="decoder_start_token_id"):
            ours(model, inputs)
    finally:
        model.generation_config.decoder_start_token_id, model.generation_config.bos_token_id = start, 1
