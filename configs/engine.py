"""The configuration of a `Generator`, and presets: configurations that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.base import Config, nearest, require_positive
from configs.cache import CacheConfig
from configs.errors import ConfigError
from configs.fallbacks import checked_fallbacks

LINEARS_CHOICES = ("auto", "default", "onednn")
COMPILE_CHOICES = ("off", "auto", "inductor", "aot_eager", "eager")
WEIGHTS_CHOICES = ("file", "full", "int8", "int4")
ACTIVATIONS_CHOICES = ("full", "int8")
BUDGET_CHOICES = ("offload", "slide", "error")
_PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class EngineConfig(Config):
    """Options of a `Generator`.

    cache: the cache of calls that do not set one: a backend's name, or its `CacheConfig` (in JSON an object such as
        {"name": "static", "max_cache_len": 4096}); None is the model's generation config's, else "dynamic".
    prefill_chunk_tokens: the prompt is computed in chunks of at most this many tokens; None computes it at once.
    compile: "off"; "auto": decode steps use compiled layers, on a CPU, as soon as another process has compiled them
        (once per shape of the model and machine, 10 to 90 s; stored like `linears`), until then and where they cannot
        be compiled they are computed without; or the `torch.compile` backend that compiles the step during the call,
        for caches of fixed size. Results differ from "off" by rounding. `Stats.compiled` reports what is used.
    weights: "file", as they are loaded: linear layers and embeddings of a GGUF file keep its codes, on a CPU and of the
        types Q8_0, Q6_K, Q5_K, Q5_1, Q5_0, Q4_K, Q4_1 and Q4_0; "full": all such weights are decoded; "int8" or "int4":
        linear layers on a CPU keep codes of 8 or 4 bits in place of their weights, also those of a model that was
        given, and the text changes. Each 32 inputs of an output have a scale, with "int4" also a least value, and
        codes of 5 bits where there are fewer outputs than inputs.
    activations: the inputs of products with such codes. "full": their sums are as exact as in float32; "int8": inputs
        are rounded to 8 bits, with a scale for each 32 of them, which changes the text a little more, and computes 16
        to 256 rows up to twice as fast. For processors with AVX-512 VNNI; with AMX only fewer than 16 rows are rounded.
        A model keeps it, as it keeps its codes: load it again for "full".
    linears: the matrix product of linear layers on a CPU. "default": torch's own; "onednn", of float32 weights;
        "auto": by the kind of processor and the number of rows, mostly a kernel of this package, where it was built
        when the package was installed; or for float32 weights what `engine linears` has measured on this machine
        (stored in `$KVENGINE_CACHE`, by default the user's cache folder). Results differ by rounding. `Stats.linears`
        reports the choice.
    on_oom: the fallbacks, in this order, when an allocation fails during a run; after the last one the run ends with
        `engine.OutOfMemoryError`. "release": free compiled graphs, stored prefixes and idle memory. "chunk": compute
        the prompt in smaller chunks. "offload": move the live cache to host memory, or to disk if the model computes on
        the CPU. "quantize": the same in few bits; the only fallback that changes the text. "split": compute the batch
        in parts.
    max_cache_bytes: the most bytes of device memory for the cache of a call; None is no limit.
    over_budget: what happens when the cache would need more. "offload": as in on_oom. "slide": keep only the last
        tokens that fit, which changes the text. "error": `engine.OutOfMemoryError` with the text so far.
    prefix_store_bytes: the caches of calls are kept, in at most so many bytes of memory: a later prompt that begins
        with the same tokens does not read these again (`Stats.cached_tokens`). This is for calls with one prompt,
        without images, embeddings or a live cache. None keeps nothing.
    prefix_store_folder: a folder for what has no room in memory, up to eight times as many bytes, also for other
        processes with the same model; None is none.
    tp: tensor parallel: processes that compute the model together, each with a part of the weights and of the cache, as
        started by torchrun. Each runs the same calls. For a model that is given as a path; without routes of `linears`.
    dtype, device_map: arguments of `from_pretrained` for a model that is given as a path.
    trust_remote_code: whether Python code in the model's repository may run while the model is loaded; if not, such a
        repository raises `InputError`.
    """

    cache: str | CacheConfig | None = None
    prefill_chunk_tokens: int | None = None
    compile: str = "off"
    weights: str = "file"
    activations: str = "full"
    linears: str = "auto"
    on_oom: tuple | list = ("release", "chunk", "offload", "split")
    max_cache_bytes: int | None = None
    over_budget: str = "offload"
    prefix_store_bytes: int | None = None
    prefix_store_folder: str | None = None
    tp: int = 1
    dtype: str = "auto"
    device_map: str = "auto"
    trust_remote_code: bool = False

    def validate(self) -> None:
        names = ("prefill_chunk_tokens", "max_cache_bytes", "prefix_store_bytes", "tp")
        require_positive("EngineConfig", **{name: getattr(self, name) for name in names})
        if self.prefix_store_folder is not None and self.prefix_store_bytes is None:
            raise ConfigError(
                "EngineConfig: prefix_store_folder is for what has no room in a prefix store, and there is none: give "
                "prefix_store_bytes too"
            )
        choices = {
            "compile": COMPILE_CHOICES,
            "weights": WEIGHTS_CHOICES,
            "activations": ACTIVATIONS_CHOICES,
            "linears": LINEARS_CHOICES,
            "over_budget": BUDGET_CHOICES,
        }
        for name, accepted in choices.items():
            if (value := getattr(self, name)) not in accepted:
                raise ConfigError(f"EngineConfig: {name}={value!r}, but it is one of {', '.join(accepted)}")
        for name, only in (
            ("compile", "off"),
            ("weights", "file"),
            ("activations", "full"),
            ("device_map", "auto"),
            ("prefix_store_folder", None),
        ):
            if self.tp > 1 and (value := getattr(self, name)) != only:
                raise ConfigError(
                    f"EngineConfig: {name}={value!r} is for a model in one process, but tp={self.tp}: leave it out"
                )
        if self.tp > 1 and self.linears == "onednn":
            raise ConfigError(f"EngineConfig: linears='onednn' is for whole weights, but tp={self.tp}: leave it out")
        if self.activations != "full" and self.weights == "full":
            raise ConfigError(
                f"EngineConfig: activations={self.activations!r} is for products with codes, and weights='full' has "
                "none: ask for weights='int8' or 'int4'"
            )
        object.__setattr__(self, "on_oom", checked_fallbacks(self.on_oom))


def presets() -> list[str]:
    """The names of the presets, configurations that come with the package."""
    return sorted(file.stem for file in _PRESETS.glob("*.json"))


def preset(name: str) -> EngineConfig:
    """The preset `name`. Raises `ConfigError` with the nearest names."""
    if name not in presets():
        raise ConfigError(f"there is no preset named {name!r}; {nearest(name, presets())}")
    return EngineConfig.from_json_file(_PRESETS / f"{name}.json")
