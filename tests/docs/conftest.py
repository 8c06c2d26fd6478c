import gc

import pytest
from injection import ERRORS

import configs
from caches import registry
from caches.quantization import codec
from strategies import registry as strategy_registry


@pytest.fixture
def own_registries(monkeypatch):
    """What a page registers is undone."""
    monkeypatch.setattr(registry, "_recipes", dict(registry._recipes))
    monkeypatch.setattr(configs.CacheConfig, "_by_name", dict(configs.CacheConfig._by_name))
    monkeypatch.setattr(strategy_registry, "_strategies", dict(strategy_registry._strategies))
    for codecs in (configs.CODECS, codec.CHOICES):  # entries are removed again
        monkeypatch.setitem(codecs, "symmetric", None)
        del codecs["symmetric"]


@pytest.fixture
def out_of_memory_at(monkeypatch):
    """The call number `count`, from 1, of `owner.name` finds no memory."""

    def fail_at(count, owner, name):
        original, left = getattr(owner, name), iter(range(count - 1, -1, -1))

        def fail(*arguments, **keywords):
            if next(left, None) == 0:
                raise ERRORS["device"]()
            return original(*arguments, **keywords)

        gc.freeze()  # a recovery collects garbage, and nothing that was there before is any
        monkeypatch.setattr(owner, name, fail)

    return fail_at
