"""What a call may say: random calls with one thing wrong are refused in words of ours, before the model is run.

All that a call says is kept as source text, so that each failure prints a script that shows it alone.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy
import pytest
import torch
import transformers
from architectures import prompt, tiny_model
from encoder_decoders import source, tiny_encoder_decoder
from helpers import try_facts

import caches
import engine
import strategies
from engine.parameters import PARAMETERS
from engine.readers import COUNT, FINITE, FLAG, POSITIVE, SHARE, Reader

MODELS = ("llama", "gpt2", "mamba", "t5", "bart", "whisper")
WITH_ENCODER = ("t5", "bart", "whisper")
ENCODE_TEXT = ("t5", "bart")
WITHOUT_ENCODER = ("llama", "gpt2", "mamba")
READ_TEXT = (*WITHOUT_ENCODER, *ENCODE_TEXT)
KEEP_COLUMNS = ("llama", "gpt2", *WITH_ENCODER)
CONTEXTS: list[dict[str, str]] = [
    {},
    {"do_sample": "True"},
    {"do_sample": "True", "num_return_sequences": "2", "temperature": "0.8"},
    {"num_beams": "3"},
    {"num_beams": "2", "do_sample": "True"},
    {"num_beams": "4", "num_beam_groups": "2", "diversity_penalty": "0.5"},
    {"penalty_alpha": "0.6", "top_k": "4"},
    {"prompt_lookup_num_tokens": "3"},
    {"max_new_tokens": "4", "eos_token_id": "7"},
]
BACKENDS = ('"dynamic"', '"static"', '"none"', '"auto"', '"offloaded"')  # of which the model has no say
LIVE = "live"  # a cache that holds an earlier turn
CONFIG = "engine_config"  # no parameter: what the generator is made with
ABOUT_CACHES = {"cache", "cache_config", "cache_implementation", "past_key_values", "trust_cache", "use_cache"}


@dataclass(frozen=True)
class Wrong:
    """What is wrong in a call. named: the message has one of these words. models: those that it is wrong for."""

    said: dict[str, str]
    named: tuple[str, ...]
    models: tuple[str, ...] = MODELS


def each(names: str, *values: str, models: tuple[str, ...] = MODELS) -> list[Wrong]:
    """Every value is wrong for every parameter."""
    return [Wrong({name: value}, (name,), models) for name in names.split() for value in values]


def read_as(reader: Reader) -> str:
    """The parameters of the table with this reader."""
    return " ".join(name for name, row in PARAMETERS.items() if row.reader is reader)


def together(named: str, models: tuple[str, ...] = MODELS, **said: str) -> Wrong:
    """What contradicts each other."""
    return Wrong(said, tuple(named.split("|")), models)


_NO_NUMBERS = ("'x'", "[1]", "object()", "{}", "float('nan')", "float('inf')", "torch.tensor([1, 2])", "1j")
_NO_WHOLE = (*_NO_NUMBERS, "2.5", "True", "numpy.float32(0.5)", "-1", "torch.tensor(1.5)")
_NO_SHARE = (*_NO_NUMBERS, "1.5", "-0.1", "True")
_NO_FLAGS = ("'yes'", "2", "[True]", "0.5", "object()")
_NO_IDS = ("'x'", "5", "[1.5]", "[['a']]", "object()", "[101]", "[3, -2]", "['a']")
_NO_ID = ("'x'", "2.5", "object()", "101", "-7", "[]", "[[1]]", "{}")
_NO_CALLABLES = ("5", "'x'", "[None]", "[5]", "object()", "transformers.LogitsProcessor", "{}")

# fmt: off
WRONG = [
    *each(read_as(POSITIVE) + " prefill_chunk_size", *_NO_WHOLE, "0"),
    *each(read_as(COUNT) + " encoder_no_repeat_ngram_size", *_NO_WHOLE),
    *each("repetition_penalty encoder_repetition_penalty", *_NO_NUMBERS, "0", "-2.0", "True"),
    *each(read_as(SHARE) + " top_h", *_NO_SHARE),
    *each("temperature", *(value for value in _NO_NUMBERS if "inf" not in value), "-0.5", "True"),
    *each(read_as(FINITE), *_NO_NUMBERS),
    *each("assistant_confidence_threshold", *_NO_NUMBERS, "2"),
    *each("max_time", "'x'", "[1]", "object()", "float('nan')", "True"),
    *each(read_as(FLAG) + " remove_invalid_values return_dict_in_generate trust_remote_code", *_NO_FLAGS),
    *each("synced_gpus disable_compile", *_NO_FLAGS),
    *each("early_stopping", "'soon'", "2", "[True]", "object()", "1"),
    *each("stop_strings", "5", "[5]", "object()", "['']", "''", "['a']"),  # there is no tokenizer
    *each("eos_token_id", "'x'", "2.5", "object()", "[['a']]", "{}"),
    *each("pad_token_id", "'x'", "2.5", "object()", "[0]"),
    *each("bos_token_id", "'x'", "2.5", "object()"),
    together("pad_token_id", pad_token_id="101", eos_token_id="7"),
    together("pad_token_id", pad_token_id="-7", eos_token_id="[7, 8]"),
    together("pad_token_id", pad_token_id="numpy.int64(400)", max_time="9"),
    together("token id 101", inputs="None", bos_token_id="101", models=WITHOUT_ENCODER),
    *each("forced_bos_token_id forced_eos_token_id", *_NO_ID, "torch.tensor(101)"),
    *each("decoder_start_token_id", *_NO_ID, "[2, 2, 2]", models=WITH_ENCODER),
    *each("decoder_start_token_id", "2", "101", models=WITHOUT_ENCODER),
    *each("suppress_tokens begin_suppress_tokens", *_NO_IDS),
    *each("bad_words_ids", "[]", "[5]", "'x'", "[[]]", "[[101]]", "[[3, -1]]", "[['a']]", "5", "object()"),
    *each("sequence_bias", "{}", "{5: 1.0}", "{(5,): 'x'}", "{(101,): 1.0}", "[[5, 1.0]]", "'x'", "5", "{(): 1.0}"),
    *each("exponential_decay_length_penalty", "5", "(1,)", "('a', 1.1)", "(1, 'b')", "object()"),
    *each("watermarking_config", "5", "'x'", "{'nonsense': 1}", "object()", "{'bias': 'x'}"),
    *each("logits_processor stopping_criteria", *_NO_CALLABLES),
    *each("prefix_allowed_tokens_fn", "5", "[lambda row, ids: [5]]", "'x'"),
    *each("strategy", "5", "'gredy'", "object()", "['greedy']", "strategies.Beam", "''", "{}"),
    *each("generation_config", "5", "'x'", "[]", "{'max_new_token': 5}", "{'max_new_tokens': 'x'}", "{5: 5}"),
    *each("generation_config", "{'top_p': 7}", "{'eos_token_id': 'x'}", "transformers.GenerationConfig", "object()"),
    *each("generation_config", "{'cache_implementation': 'none at all'}", "{'num_return_sequences': 3}"),
    *each("seed", "'x'", "1.5", "[1]", "2**64", "-2**63 - 1", "float('nan')", "True"),
    *each("cache_config", "5", "'x'", "{5: 5}", "[]", "object()"),
    together("nonsense", cache_config="{'nonsense': 3}"),
    *each("cache", "5", "'statik'", "object()", "[]", "{'name': 'static'}", "caches.StaticCache", "''"),
    *each("cache_implementation", "5", "object()", "['static']"),
    together("statik", cache_implementation="'statik'"),
    *each("past_key_values", "5", "object()", "()", "((1, 2),)", "(5,)", "'x'"),
    *each("on_oom", "5", "'offload'", "['explode']", "[5]", "['split', 'split']", "{}"),
    *each("tokenizer", "5", "'gpt2'", "object()", "[]"),
    *each("assistant_model", "5", "'gpt2'", "object()", "torch.nn.Linear(2, 2)", "transformers.LlamaForCausalLM"),
    *each("assistant_tokenizer", "5", "'gpt2'", "object()"),
    *each("streamer", "5", "'x'", "object()", "[]", "transformers.TextStreamer", "print"),
    *each("cancellation", "5", "True", "object()", "print"),
    *each("negative_prompt", "5", "'no'", "['no']", "object()"),  # there is no guidance, nor a tokenizer
    *each("negative_prompt_ids", "'x'", "5", "torch.rand(2, 2)", "[[101]]", "object()"),
    *each("token_healing assistant_early_exit use_mtp", "True", "'x'"),
    *each("compile_config low_memory dola_layers constraints force_words_ids", "5", "'x'"),
    # Names that are no parameters.
    *each("max_new_token temprature top_kk custom_generate labels logits_to_keep foo _eos_token_tensor", "5"),
    *each("n best_of stop max_tokens stop_token_ids ignore_eos prompt logprobs messages stream", "5"),
    # Inputs.
    *[Wrong({"inputs": value}, ("token id", "prompt", "input_ids", "ids", "tokenizer"), READ_TEXT) for value in (
        "torch.tensor([[4, 101]])", "torch.tensor([[4, -1]])", "torch.rand(2, 3)", "torch.ones(2, 3, 4).long()",
        "torch.ones(2, 3).bool()", "torch.ones(0, 3).long()", "torch.ones(2, 0).long()", "torch.tensor(True)",
        "'hello'", "['hello', 'you']", "5.5", "object()", "[]", "[[]]", "[['a']]", "numpy.ones((2, 3))",
        "{'input_ids': 'x'}", "{'input_ids': torch.rand(2, 3)}", "{'input_ids': object()}", "b'bytes'",
        "[[1, 2], ['a', 'b']]", "torch.ones(2, 3).long() * 2**40", "[{'role': 'user', 'content': 'x'}]",
    )],
    *[Wrong({"inputs": value}, ("input_features", "prompt"), ("whisper",)) for value in (
        "'hello'", "['hello', 'you']", "5.5", "object()", "[]", "[['a']]", "[1, 2]", "numpy.array(['x'])", "b'bytes'",
        "torch.ones(2, 3).long()", "ids[0]", "ids[:, :7]", "ids[..., :9]", "ids[:0]", "ids.half()", "ids.long()",
        "ids.numpy()[:, 1:]", "{'input_features': 'x'}", "torch.tensor(True)",
    )],
    *each("attention_mask", "'x'", "object()", "torch.ones(3, 13)", "torch.ones(2, 13, 13)", "5"),
    *each("attention_mask", "torch.ones(2, 5)", "[[1, 1]]", models=READ_TEXT),
    *each("inputs_embeds", "'x'", "5", "torch.rand(2, 13)", "torch.rand(2, 13, 7)", "object()", "ids",
          models=READ_TEXT),
    *each("position_ids", "'x'", "torch.zeros(2, 3)", "object()", "torch.zeros(3, 13).long()", "5",
          models=("llama", "gpt2")),
    *each("position_ids", "torch.full((2, 13), 400)", "torch.rand(2, 13)", "torch.full((2, 13), -5)",
          models=("gpt2",)),
    *each("token_type_ids", "'x'", "torch.zeros(2, 3).long()", "torch.rand(2, 13)", "torch.full((2, 13), 101)",
          "torch.full((2, 13), -1)", "object()", models=("gpt2",)),
    *each("token_type_ids pixel_values input_features", "torch.zeros(2, 13).long()", models=("llama", "mamba", "t5")),
    *each("decoder_input_ids", "'x'", "torch.rand(2, 3)", "torch.ones(3, 2).long()", "[[2, 101]]", "object()", "5",
          "torch.full((2, 2), -1)", "torch.ones(2, 2, 2).long()", models=WITH_ENCODER),
    *each("decoder_attention_mask", "'x'", "torch.ones(2, 9)", "object()", "5", models=WITH_ENCODER),
    *each("decoder_inputs_embeds", "torch.rand(2, 2, 32)", "'x'", models=WITH_ENCODER),
    *each("encoder_outputs", "'x'", "5", "()", "object()", "(5,)", "torch.rand(2, 13, 32)", models=WITH_ENCODER),
    *each("encoder_outputs", "(torch.rand(2, 13, 7),)", "(torch.rand(2, 13),)", "(torch.rand(2, 0, 32),)",
          "(torch.rand(3, 13, 32),)", "(torch.rand(2, 13, 32).half(),)", "(torch.ones(2, 13, 32).long(),)",
          models=WITH_ENCODER),
    together("attention_mask", encoder_outputs="(torch.rand(2, 13, 32),)", attention_mask="torch.ones(3, 13)",
             models=WITH_ENCODER),
    together("attention_mask", encoder_outputs="(torch.rand(2, 13, 32),)", attention_mask="torch.ones(2, 9)",
             models=ENCODE_TEXT),
    *each("decoder_input_ids encoder_outputs", "ids", models=WITHOUT_ENCODER),
    # What contradicts each other.
    together("both|cache", cache="'static'", cache_implementation="'dynamic'"),
    together("use_cache", cache="'static'", use_cache="False"),
    together("trust_cache", trust_cache="True"),
    together("twice", inputs="ids", input_ids="ids", models=READ_TEXT),
    together("twice", inputs="{'input_ids': ids}", input_ids="ids", models=READ_TEXT),
    together("twice", inputs="ids", input_features="ids", models=("whisper",)),
    together("do_sample", strategy="'greedy'", do_sample="True"),
    together("do_sample", strategy="'sampling'", do_sample="False"),
    together("num_beams", strategy="'greedy'", num_beams="4"),
    together("num_return_sequences", num_beams="2", num_return_sequences="3"),
    together("num_beams|num_beam_groups", num_beams="3", num_beam_groups="2", diversity_penalty="1.0"),
    together("temperature", do_sample="True", temperature="0.0"),
    together("temperature", do_sample="False", temperature="0.7"),
    together("top_p", do_sample="False", top_p="0.7"),
    together("max_length", max_length="3", max_new_tokens="None", models=WITHOUT_ENCODER),
    together("exponential_decay", exponential_decay_length_penalty="(1, 1.1)", eos_token_id="None"),
    together("exponential_decay", exponential_decay_length_penalty="(1, 1.1)", eos_token_id="4000"),
    together("positions", max_new_tokens="4000", models=("llama", "gpt2", "bart", "whisper")),
    together("suppress", suppress_tokens="[5]", forced_eos_token_id="5"),
    together("negative_prompt_ids", guidance_scale="2.0", negative_prompt="'no'", negative_prompt_ids="[[5]]",
             models=WITHOUT_ENCODER),
    together("negative_prompt_ids", guidance_scale="2.0", negative_prompt_ids="[[500]]", models=WITHOUT_ENCODER),
    together("guidance_scale", guidance_scale="2.0", models=WITH_ENCODER),
    together("assistant", prompt_lookup_num_tokens="3", assistant_model="model"),
    together("assistant_model", strategy="'assisted'"),
    together("assistant_model", assistant_model="model", num_beams="3"),
    together("assistant_tokenizer", assistant_tokenizer="transformers.PreTrainedTokenizerFast"),
    together("stop_strings", stop_strings="['a']", tokenizer="None"),
    together("cache_config", cache="'auto'", cache_config="{'max_cache_len': 9}"),
    together("max_cache_len", cache="'static'", cache_config="{'max_cache_len': 'x'}"),
    together("max_cache_len", cache="'static'", cache_config="{'max_cache_len': 0}"),
    together("max_cache_len", cache="'static'", cache_config="{'max_cache_len': 3}", models=KEEP_COLUMNS),
    together("pieces", cache="'none'", prefill_chunk_size="2"),
    together("disable_compile", engine_config="compile='aot_eager'", cache="'static'", disable_compile="True"),
    together("compile", engine_config="compile='aot_eager'", cache="'dynamic'"),
    together("compile", engine_config="compile='aot_eager'", cache="'none'"),
    together("encoder|assistant_model", assistant_model="other"),
    together("max_batch_size", cache="caches.build('static', model.config, max_cache_len=64, max_batch_size=2)",
             num_beams="4", models=KEEP_COLUMNS),
    together("contrastive", cache="live", penalty_alpha="0.6", top_k="4", models=WITHOUT_ENCODER),
    together("contrastive", cache="live", penalty_alpha="0.6", top_k="4", decoder_input_ids="sequences",
             models=WITH_ENCODER),
    together("begin this prompt", cache="live", decoder_input_ids="sequences.flip(1)", models=WITH_ENCODER),
    together("begin this prompt", cache="live", inputs="ids.flip(1)", models=WITHOUT_ENCODER),
]
# fmt: on


@dataclass(frozen=True)
class Call:
    """model: its name. face: "generate" or "stream". said: arguments as source text, the wrong ones among them."""

    model: str
    face: str
    said: dict[str, str]
    named: tuple[str, ...]

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.said.items() if name != CONFIG)
        if CONFIG not in self.said:
            return f"engine.{self.face}(model, {said})"
        config = self.said[CONFIG]
        return f"engine.Generator(model, config=engine.EngineConfig({config})).{self.face}({said})"

    @property
    def goes_on(self) -> bool:
        return self.said.get("cache") == LIVE

    @property
    def other(self) -> str:
        """A model of another kind."""
        return "llama" if self.model in WITH_ENCODER else "t5"

    @property
    def script(self) -> str:
        return "\n".join(
            [
                'import sys; sys.path += ["tests/support", "tests/interface"]',
                "import numpy, torch, transformers",
                "import caches, engine, strategies",
                "from test_wrong_calls import model_and_ids, turn",
                "",
                f"model, ids = model_and_ids({self.model!r})",
                f"other, _ = model_and_ids({self.other!r})",
                *(["live, ids, sequences = turn(model, ids)"] if self.goes_on else []),
                f"print({self})",
            ]
        )


@cache
def model_and_ids(name: str) -> tuple[Any, torch.Tensor]:
    """The model, and the ids of a prompt, or what its encoder reads: ids or features. What is so of it is known."""
    model = tiny_encoder_decoder(name) if name in WITH_ENCODER else tiny_model(name)
    try_facts(model)
    return model, next(iter(source(name).values())) if name in WITH_ENCODER else prompt(pads=0)["input_ids"]


def turn(model: Any, ids: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A cache that holds an earlier turn, the ids to go on with, and the decoder's of them."""
    out = engine.generate(model, ids, max_new_tokens=3)
    return out.cache, ids if model.config.is_encoder_decoder else out.sequences, out.sequences


def right_call(model: str, face: str, context: dict[str, str], cache: str | None) -> Call:
    """One with nothing wrong."""
    said = {"inputs": "ids", "max_new_tokens": "5"} | context | ({} if cache is None else {"cache": cache})
    if cache == LIVE and model in WITH_ENCODER:
        said["decoder_input_ids"] = "sequences"
    return Call(model, face, said, ())


def wrong_call(numbers: random.Random) -> Call:
    wrong = numbers.choice(WRONG)
    model, face = numbers.choice(wrong.models), numbers.choice(("generate", "stream"))
    # Where several things are wrong together, any other may be the first that is noticed.
    context, backend = numbers.choice(CONTEXTS), numbers.choice([None, None, LIVE, *BACKENDS])
    context = context if len(wrong.said) == 1 else {}
    begins_anew = "penalty_alpha" in context or "guidance_scale" in wrong.said
    if ABOUT_CACHES & set(wrong.said) or (backend == LIVE and begins_anew):
        backend = None
    said = right_call(model, face, context, backend).said
    if backend == '"static"' and model != "mamba" and len(wrong.said) == 1 and numbers.random() < 0.5:
        said[CONFIG] = "compile='aot_eager'"
    if "inputs_embeds" in wrong.said:
        del said["inputs"]
    return Call(model, face, said | wrong.said, wrong.named)


def fault_of(call: Call) -> str | None:
    """What is wrong about how this call is refused; None where nothing is."""
    model, ids = model_and_ids(call.model)
    names = {"model": model, "ids": ids, "engine": engine, "caches": caches, "strategies": strategies}
    names |= {"other": model_and_ids(call.other)[0], "numpy": numpy, "torch": torch, "transformers": transformers}
    before = None
    if call.goes_on:
        names["live"], names["ids"], names["sequences"] = turn(model, ids)
        before = pickle.dumps(names["live"])
    forwards: list[str] = []
    parts = {model, model.base_model, model.get_decoder()}
    parts |= {model.get_encoder()} if call.model in ENCODE_TEXT else set()
    hooks = [part.register_forward_pre_hook(lambda part, given: forwards.append(type(part).__name__)) for part in parts]
    if call.model == "whisper":  # its encoder itself says which features it cannot read
        encoder = model.get_encoder()
        hooks.append(encoder.register_forward_hook(lambda part, *given: forwards.append(type(part).__name__)))
    try:
        eval(str(call), names)
        return "it was accepted"
    except (engine.EngineError, caches.CacheError) as error:
        if isinstance(error, engine.GenerationInterrupted):
            return f"it was interrupted late: {error}"
        if forwards:
            return f"{forwards[0]} was run before: {type(error).__name__}: {error}"
        if not any(name in str(error) for name in call.named):
            return f"the message names none of {', '.join(call.named)}: {type(error).__name__}: {error}"
        if len(str(error)) > 500:
            return f"a message of {len(str(error))} characters: {error}"
    except Exception as error:
        return f"bare {type(error).__name__}: {error}"
    finally:
        for hook in hooks:
            hook.remove()
    if before is not None and pickle.dumps(names["live"]) != before:
        return "the live cache is another one"
    return None


def check(calls: int, seed: int = 0) -> list[str]:
    """What is wrong about so many random calls, each with a script that shows it."""
    numbers, found = random.Random(seed), []
    for _ in range(calls):
        call = wrong_call(numbers)
        fault = fault_of(call)
        if fault is not None:
            found.append(f"# {fault}\n{call.script}\n")
    return found


FEW = ("llama", "mamba", "bart")


def test_wrong_calls_are_refused_before_any_work():
    found = check(200)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_many_wrong_calls():
    found = check(1000, seed=1)
    assert not found, "\n".join(found)


ACCEPTED = [
    (context, backend)
    for context, backend in product(CONTEXTS, (None, LIVE, *BACKENDS))
    if backend != LIVE or "penalty_alpha" not in context
]


@pytest.mark.parametrize(
    ("model", "cases"),
    [*((model, ACCEPTED[turn :: len(FEW)]) for turn, model in enumerate(FEW)),
     *(pytest.param(model, ACCEPTED, marks=pytest.mark.slow) for model in MODELS)],
    ids=lambda value: value if isinstance(value, str) else len(value),
)  # fmt: skip
def test_with_nothing_wrong_they_are_accepted(model, cases):
    for context, backend in cases:
        call = right_call(model, "generate", context, backend)
        assert fault_of(call) == "it was accepted", call.script
