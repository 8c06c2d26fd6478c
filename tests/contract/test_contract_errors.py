"""What is wrong is refused with an error that says what to do, and leaves a cache as it was."""

import pytest
import torch
from contract import HYBRID, SIZE, each_cell, keys_of
from trial import Trial

import caches
from caches.layers.layer_spec import INDEX, KV, STATE

pytestmark = pytest.mark.covering("values", "pairs")

WRONG_STEPS = {
    "more rows": lambda keys: keys.repeat(2, 1, 1, 1),
    "more heads": lambda keys: keys.repeat(1, 2, 1, 1),
    "wider": lambda keys: keys.repeat(1, 1, 1, 2),
    "another data type": lambda keys: keys.float(),
}


@pytest.fixture
def trial(backend, kind):
    trial = Trial(backend, kind)
    trial.step(9)
    return trial


def refuses(trial, error, match, operation, *arguments):
    """Raises, in our own loop and in others; what was held is held, and the next step works."""
    for driven in (True, False):
        if driven:
            trial.cache.begin(1)
        with pytest.raises(error, match=match):
            operation(*arguments)
        if driven:
            trial.cache.abort()
        trial.step(1)
        trial.check()


def first(trial, stream):
    return next((index for index, spec in enumerate(trial.kind.specs) if stream in spec.components), None)


def last(trial, stream):
    return max((index for index, spec in enumerate(trial.kind.specs) if stream in spec.components), default=None)


@pytest.mark.parametrize("wrong", WRONG_STEPS)
@each_cell
def test_steps_of_another_model(trial, wrong):
    """Also where it is the last layer that refuses, after all others have taken theirs."""
    layer = last(trial, KV)
    keys = keys_of(trial.fresh(1), 0)
    if layer is None:
        refuses(trial, caches.UnsupportedLayerError, "keeps no keys and values", trial.own.update, keys, keys, 0)
        return
    wrong_keys = WRONG_STEPS[wrong](keys)
    match = "the step has" if wrong == "more rows" else "a cache belongs to one model"

    def forward():
        trial.forward(trial.fresh(1), range(layer))
        trial.own.update(wrong_keys, wrong_keys, layer)

    refuses(trial, caches.StepError, match, forward)


@pytest.mark.parametrize("layer", [None, -1, 99])
@each_cell
def test_layers_that_are_not_there(trial, layer):
    keys, own = keys_of(trial.fresh(1), 0), trial.own
    for call in (
        lambda: own.update(keys, keys, layer),
        lambda: own.update_indexer(keys[:, 0], layer),
        lambda: own.get_conv_state(layer),
        lambda: own.get_recurrent_state(layer),
        lambda: own.update_conv_state(keys[:, 0], layer, conv_kernel_size=4),
        lambda: own.update_recurrent_state(keys[:, 0], layer),
    ):
        refuses(trial, caches.UnsupportedLayerError, rf"layer {layer} was asked for.*numbered", call)


@each_cell
def test_streams_that_a_layer_does_not_keep(trial):
    keys = keys_of(trial.fresh(1), 0)
    calls = {
        KV: lambda layer: trial.own.update(keys, keys, layer),
        INDEX: lambda layer: trial.own.update_indexer(keys[:, 0], layer),
        STATE: lambda layer: trial.own.get_conv_state(layer),
    }
    tried = 0
    for layer, spec in enumerate(trial.kind.specs):
        for stream in calls.keys() - spec.components:
            match = rf"layer {layer} \({spec.layer_type}\) keeps no .*configuration of the model"
            refuses(trial, caches.UnsupportedLayerError, match, calls[stream], layer)
            tried += 1
    assert tried or trial.kind.specs[0] == HYBRID


@each_cell
def test_states_of_another_model(trial):
    layer = first(trial, STATE)
    if layer is None:
        refuses(trial, caches.UnsupportedLayerError, "keeps no state", trial.own.get_conv_state, 0)
        return
    conv = trial.own.layers[layer].conv_states[0]
    for wrong, match in ((conv.repeat(2, 1, 1), "the step has"), (conv.repeat(1, 2, 1), "belongs to one model")):
        update = trial.own.update_conv_state
        refuses(trial, caches.StepError, match, lambda: update(wrong, layer, conv_kernel_size=4))  # noqa: B023


@each_cell
def test_more_than_there_is_room_for(trial):
    if trial.limit is None:
        trial.step(SIZE + 1)
        trial.check()
        return
    trial.step(SIZE - trial.total_tokens - 2)
    match = f"holds {SIZE - 2} of at most {SIZE} tokens and cannot take 3 more: 1 too many.*max_cache_len={SIZE + 1}"
    for attempt in (lambda: trial.cache.begin(3), lambda: trial.feed(3)):
        if trial.kind.has_states or any(spec.keeps_kv for spec in trial.kind.specs):
            with pytest.raises(caches.CapacityError, match=match):
                attempt()
            trial.check()
    trial.step(2)
    trial.check()


@each_cell
def test_steps_out_of_order(trial):
    cache = trial.cache
    with pytest.raises(caches.StepError, match="without begin"):
        cache.commit()
    cache.begin(2)
    refusals = {"begin": 2, "select_rows": torch.tensor([0]), "crop": 1, "reserve": SIZE}
    for operation, argument in refusals.items():
        with pytest.raises(caches.StepError, match=r"open: commit\(\) or abort\(\)"):
            getattr(cache, operation)(argument)
    tokens = trial.fresh(2)
    trial.forward(tokens)
    for rejected in (3, -1):
        with pytest.raises(caches.StepError, match=f"rejected={rejected}.*has 2 tokens"):
            cache.commit(rejected)
    cache.commit()
    trial.commit(tokens)
    trial.check()


@each_cell
def test_numbers_that_are_not_finite(trial):
    trial.cache.check_finite()
    specs = trial.kind.specs
    layer = max(index for index, spec in enumerate(specs) if spec.components)
    if KV in specs[layer].components:
        name, tokens = "keys", trial.fresh(1)
        trial.cache.begin(1)
        trial.forward(tokens, [index for index in range(len(specs)) if index != layer])
        keys = keys_of(tokens, layer)
        keys[1, 1] = float("nan")
        trial.own.update(keys, keys, layer)
        trial.cache.commit()
    else:
        name, held = next(iter(trial.own.layers[layer].dense_state().items()))
        held[1, ..., -1] = float("nan")
    with pytest.raises(caches.StepError, match=f"layer {layer}: .*elements of {name} in row 1 are NaN"):
        trial.cache.check_finite()
