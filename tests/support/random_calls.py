"""Random calls of the engine beside the same ones of transformers' `generate`, with equal seeds.

Both say the same, or what differs is told on the page docs/reference/differences.md: refusals by the beginnings of
their messages, other texts by one of the narrow cases in `random_outcomes.py`. A call is kept as the source of its
arguments, so a failure prints a script. Run as a program to make many: `python tests/support/random_calls.py 20000
--workers 2`.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from random_models import LETTERS, MODELS, VOCABULARY, WINDOW, model

import caches
from configs import ConfigError

PAIRS = ("t5", "bart")
THEIRS = ["DynamicCache"]  # an object of transformers' own


@cache
def cells() -> list[tuple[str, str]]:
    """Every model with every backend that loses nothing of its texts: calls take them in turn."""
    return [(name, backend) for name in MODELS for backend in [*caches.names(), *THEIRS] if _is_lossless(name, backend)]


def _is_lossless(name: str, backend: str) -> bool:
    if backend in THEIRS:
        return name not in (*PAIRS, "mamba", "lfm2")
    options = {"max_cache_len": 64} if caches.recipe(backend).has_a_size else {}
    try:
        built = caches.build(backend, model(name).config, **options)
    except (caches.UnsupportedLayerError, ConfigError):
        return False
    if built.handle is None:
        return True
    return not built.is_quantized and not any(part.view.imposes_windows for part in getattr(built, "parts", ()))


@dataclass
class Call:
    """given: the source of every argument that both get. setup: statements before. backend: of the engine's cache.

    turn: new tokens of every row for a second turn, as source. draws: whether equal seeds mean equal texts.
    """

    seed: int
    name: str
    dtype: str
    backend: str
    mode: str
    given: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    turn: str | None = None

    @property
    def chooses(self) -> bool:
        """Whether parameters of both say which cache."""
        everything = " ".join([*self.given, *self.given.values(), *self.setup])
        return "use_cache" in everything or "cache_implementation" in everything

    @property
    def own(self) -> str:
        """The engine's argument for its cache, as source."""
        if self.chooses:
            return ""
        return (
            f"past_key_values={self.backend}(config=the.config)"
            if self.backend in THEIRS
            else f"cache={self.backend!r}"
        )

    @property
    def drafts(self) -> bool:
        """Whether tokens are proposed."""
        return any(name in self.script() for name in ("assistant_model", "prompt_lookup_num_tokens"))

    def script(self) -> str:
        given = "".join(f"    {name}={source},\n" for name, source in self.given.items())
        lines = [
            f"# seed {self.seed}: {self.mode}. Run it with the repository and tests/support on PYTHONPATH.",
            "import copy, torch, engine",
            "from transformers import *",
            "from random_models import *",
            f"the = model({self.name!r}, {self.dtype})",
            *self.setup,
            f"def given(): return dict(\n{given})",
            "torch.manual_seed(7)",
            f"ours = engine.generate(the, **given(), {self.own})",
            "torch.manual_seed(7)",
            "theirs = the.generate(**given())",
            "print(ours, theirs, sep='\\n\\n')",
        ]
        if self.turn is not None:
            lines.append(f"# second turn, on both caches, with the new tokens {self.turn}")
        return "\n".join(lines)


class _Drawn:
    """One call, drawn."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        name, backend = cells()[seed % len(cells())]
        weights = {"greedy": 30, "sample": 21, "beams": 19, "beam sampling": 12, "draft": 6, "lookup": 6,
                   "drawn lookup": 1, "groups": 1, "contrastive": 1}  # fmt: skip
        [mode] = self.random.choices(list(weights), list(weights.values()))
        # torch multiplies the experts of mixtral in float32 alone.
        dtype = "torch.float64" if self.maybe(0.15) and name != "mixtral" else "torch.float32"
        self.call = Call(seed, name, dtype, backend, mode)
        self.is_encoder_decoder = name in PAIRS
        self.rows, self.columns = self.random.choice([1, 1, 2, 2, 3]), self.random.randint(1, WINDOW + 5)
        if mode in ("draft", "lookup") and self.maybe(0.8):
            self.rows = 1  # transformers can no more
        self.given = self.call.given
        self.ends: list[int] | None = None
        self.source() if self.is_encoder_decoder else self.prompt()
        for draw in (self.strategy, self.length, self.stops, self.processors, self.warpers, self.records, self.rare):
            draw()
        self.place()
        if self.maybe(0.25):
            self.call.turn = self.ids(self.rows, self.random.randint(1, 2))

    def maybe(self, chance: float) -> bool:
        return self.random.random() < chance

    def pick(self, *options: object) -> str:
        return repr(self.random.choice(options))

    def number(self, low: float, high: float) -> str:
        return str(round(self.random.uniform(low, high), 2))

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, VOCABULARY) for _ in range(count)]

    def ids(self, rows: int, columns: int) -> str:
        return f"torch.tensor({[self.tokens(columns) for _ in range(rows)]})"

    # What is read.

    def prompt(self) -> None:
        rows = [self.tokens(self.columns) for _ in range(self.rows)]
        mask = [[1] * self.columns for _ in rows]
        if self.maybe(0.5) and self.columns > 1:
            pads = self.random.randint(1, self.columns - 1)
            row = self.random.randrange(self.rows)
            rows[row][:pads], mask[row][:pads] = [0] * pads, [0] * pads
        if self.maybe(0.05):
            rows[0][self.random.randrange(self.columns)] = 0
        kind = self.random.choices(["ids", "inputs", "embeds", "both", "none"], [70, 15, 8, 4, 2])[0]
        if kind == "none":
            self.rows, self.columns = 1, 1
            return
        if kind == "both":
            self.given["input_ids"] = f"torch.tensor({[row[len(row) // 2 :] for row in rows]})"
        if kind in ("embeds", "both"):
            self.given["inputs_embeds"] = f"the.get_input_embeddings()(torch.tensor({rows})).detach()"
        else:
            self.given["inputs" if kind == "inputs" else "input_ids"] = f"torch.tensor({rows})"
        if self.maybe(0.6):
            self.given["attention_mask"] = f"torch.tensor({mask})"

    def source(self) -> None:
        rows, pads = [self.tokens(self.columns) for _ in range(self.rows)], self.random.randint(0, self.columns // 2)
        mask = [[1] * self.columns for _ in rows]
        if pads:
            rows[0][-pads:], mask[0][-pads:] = [0] * pads, [0] * pads
        kind = self.random.choices(["ids", "inputs", "embeds", "outputs", "none"], [60, 15, 8, 12, 2])[0]
        if kind == "none":
            self.rows = 1
            return
        if kind == "embeds":
            self.given["inputs_embeds"] = f"the.get_input_embeddings()(torch.tensor({rows})).detach()"
        elif kind == "outputs":
            read = f"torch.tensor({rows}), attention_mask=torch.tensor({mask})"
            self.given["encoder_outputs"] = f"the.get_encoder()({read})"
        else:
            self.given["inputs" if kind == "inputs" else "input_ids"] = f"torch.tensor({rows})"
        if self.maybe(0.7):
            self.given["attention_mask"] = f"torch.tensor({mask})"
        if self.maybe(0.25):
            begun = [[2 if self.maybe(0.7) else 5, *self.tokens(self.random.choice([0, 1, 3]))]] * self.rows
            self.given["decoder_input_ids"] = f"torch.tensor({begun})"
        self.columns = 1

    # How tokens are chosen.

    def strategy(self) -> None:
        mode, given = self.call.mode, self.given
        if mode in ("sample", "beam sampling", "drawn lookup"):
            given["do_sample"] = "True"
        elif self.maybe(0.5) or mode in ("draft", "lookup"):
            given["do_sample"] = "False"
        if mode == "sample" and self.maybe(0.3):
            given["num_return_sequences"] = self.pick(2, 3)
        if mode in ("beams", "beam sampling", "groups"):
            beams = self.random.choice([2, 3, 4])
            given["num_beams"] = repr(beams)
            if self.maybe(0.5):
                given["num_return_sequences"] = repr(self.random.randint(1, beams))
            if self.maybe(0.4):
                given["length_penalty"] = self.pick(-1.0, 0.0, 0.5, 2.0)
            if self.maybe(0.4):
                given["early_stopping"] = self.pick(True, False, "never")
        if mode == "groups":
            given |= {"num_beam_groups": "2", "diversity_penalty": "0.5"}
        if mode == "contrastive":
            given |= {"penalty_alpha": "0.6", "top_k": "3"}
        if mode == "draft":
            given["assistant_model"] = f"model({self.call.name!r}, {self.call.dtype}, draft=True)"
        if "lookup" in mode:
            given["prompt_lookup_num_tokens"] = self.pick(2, 3)

    def warpers(self) -> None:
        draws = "do_sample" in self.given and self.given["do_sample"] == "True"
        chance = 0.22 if draws else 0.012
        for name, source in (
            ("temperature", self.number(0.3, 1.8)), ("top_k", self.pick(1, 3, 10, 200)), ("top_p", self.number(0.2, 1)),
            ("min_p", self.number(0, 0.4)), ("typical_p", self.number(0.3, 1)), ("eta_cutoff", self.number(0, 0.1)),
            ("epsilon_cutoff", self.number(0, 0.1)),
        ):  # fmt: skip
            if self.maybe(chance):
                self.given[name] = source

    def processors(self) -> None:
        a_few = self.tokens(self.random.randint(1, 4))
        ended = self.ends is not None
        for name, source, chance in (
            ("repetition_penalty", self.number(0.7, 2), 0.1), ("no_repeat_ngram_size", self.pick(1, 2, 3), 0.07),
            ("bad_words_ids", repr([[one] for one in a_few] + [self.tokens(2)]), 0.06),
            ("sequence_bias", repr([[[one], 4.0] for one in a_few]), 0.05), ("suppress_tokens", repr(a_few), 0.06),
            ("begin_suppress_tokens", repr(a_few), 0.05), ("forced_eos_token_id", self.pick(7, [7, 8]), 0.05),
            ("forced_bos_token_id", "9", 0.05), ("min_new_tokens", self.pick(1, 2, 4), 0.1 + 0.1 * ended),
            ("min_length", repr(self.columns + self.random.randint(0, 4)), 0.06),
            ("exponential_decay_length_penalty", "(1, 1.5)", 0.06 * ended), ("renormalize_logits", "True", 0.06),
            ("remove_invalid_values", "True", 0.04), ("encoder_repetition_penalty", "1.5", 0.04),
            ("encoder_no_repeat_ngram_size", "2", 0.03), ("guidance_scale", self.pick(1.5, 0.5, 1, 3), 0.05),
            ("watermarking_config", "WatermarkingConfig(bias=3.0)", 0.02),
            ("logits_processor", self.random.choice(["[NoStutter()]", "[Favours(2)]", "[Favours(1), NoStutter()]",
                                                     "LogitsProcessorList([Favours(4)])"]), 0.12),
            ("prefix_allowed_tokens_fn", "every_other", 0.05),
        ):  # fmt: skip
            if self.maybe(chance):
                self.given[name] = source
        if "guidance_scale" in self.given and self.maybe(0.6):
            rows = self.random.choice([1, self.rows])
            self.given["negative_prompt_ids"] = self.ids(rows, self.random.choice([self.columns, 1, 5]))

    # When it ends, what comes back.

    def length(self) -> None:
        way = self.random.random()
        if way < 0.82:
            self.given["max_new_tokens"] = repr(self.random.randint(1, 7))
        elif way < 0.97:
            self.given["max_length"] = repr(self.columns + self.random.randint(0 if self.maybe(0.1) else 1, 6))

    def stops(self) -> None:
        first = self.random.randint(3, 9)
        one = self.random.randrange(3, VOCABULARY)
        options = [None, one, [one], list(range(first, VOCABULARY, 6)), [one, one], [first, *range(first, 90, 11)]]
        [self.ends] = self.random.choices(options, [36, 6, 6, 28, 12, 12])
        if self.ends is not None:
            self.given["eos_token_id"] = repr(self.ends)
        if self.maybe(0.3):
            self.given["pad_token_id"] = self.pick(0, 1, 3)
        if self.maybe(0.2):
            kind = self.random.choice(list(LETTERS))
            letters = [self.random.choices(LETTERS[kind], k=self.random.choice([1, 2, 2, 2, 3])) for _ in range(6)]
            found = ["".join(text) for text in letters]
            self.given |= {"stop_strings": self.pick(found, found[0]), "tokenizer": f"tokenizer({kind!r})"}
        if self.maybe(0.1):
            ways = [f"EndsAt({self.columns + 2})", "EndsBehind(4)"]
            self.given["stopping_criteria"] = f"StoppingCriteriaList([{self.random.choice(ways)}])"

    def records(self) -> None:
        if self.maybe(0.85):
            self.given["return_dict_in_generate"] = "True"
        for name, chance in (("output_scores", 0.4), ("output_logits", 0.3), ("output_hidden_states", 0.1),
                             ("output_attentions", 0.1)):  # fmt: skip
            if self.maybe(chance):
                self.given[name] = "True"

    def rare(self) -> None:
        for name, source, chance in (
            ("use_cache", "False", 0.03), ("cache_implementation", self.pick("static", "dynamic"), 0.03),
            ("num_assistant_tokens", "3", 0.01), ("length_penalty", "2.0", 0.005), ("num_beams", "1", 0.03),
            ("prefill_chunk_size", "3", 0.02), ("low_memory", "True", 0.003), ("token_healing", "True", 0.003),
            ("max_time", "100.0", 0.01), ("bos_token_id", "1", 0.05), ("decoder_start_token_id", "2", 0.04),
            ("num_return_sequences", "2", 0.005), ("penalty_alpha", "0.5", 0.005),
        ):  # fmt: skip
            if self.maybe(chance) and name not in self.given:
                self.given[name] = source

    def place(self) -> None:
        """Some of the parameters may stand in a configuration."""
        inputs = {"input_ids", "inputs", "inputs_embeds", "attention_mask", "encoder_outputs", "decoder_input_ids",
                  "assistant_model", "tokenizer", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
                  "negative_prompt_ids"}  # fmt: skip
        free = [name for name in self.given if name not in inputs]
        chosen = [name for name in free if self.maybe(0.6)]
        said = ", ".join(f"{name}={self.given[name]}" for name in chosen)
        way = self.random.random()
        if way < 0.16:
            self.given["generation_config"] = f"GenerationConfig({said})"
        elif way < 0.24:
            self.call.setup.append(f"the.generation_config = GenerationConfig({said})")
        elif way < 0.28:
            self.given["generation_config"] = "copy.deepcopy(the.generation_config)"
            return
        else:
            return
        for name in chosen:
            del self.given[name]


def draw(seed: int) -> Call:
    return _Drawn(seed).call


# Many of them.


def play(seeds: range) -> tuple[Counter[str], dict[str, list[int]], list[str]]:
    """How these calls come out: how often, examples of every kind, and what failed."""
    from random_outcomes import outcome

    counts: Counter[str] = Counter()
    examples: dict[str, list[int]] = {}
    failures = []
    for seed in seeds:
        call = draw(seed)
        kind, told = outcome(call)
        counts[kind] += 1
        examples.setdefault(kind, []).append(seed)
        if kind in ("different", "not on the page"):
            failures.append(f"{kind}: {told}\n{call.script()}")
    return counts, examples, failures


def _without_warnings() -> None:
    for name in ("transformers", "engine"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def main(number: int, workers: int, begin: int) -> int:
    began, step = time.time(), 100
    parts = [range(first, min(first + step, begin + number)) for first in range(begin, begin + number, step)]
    counts: Counter[str] = Counter()
    examples: dict[str, list[int]] = {}
    failed = 0
    with multiprocessing.get_context("spawn").Pool(workers, _without_warnings) as pool:
        for done, (more, seeds, failures) in enumerate(pool.imap_unordered(play, parts), 1):
            counts += more
            failed += len(failures)
            for kind, found in seeds.items():
                examples[kind] = sorted([*examples.get(kind, []), *found])[:5]
            for failure in failures:
                print(failure, end="\n\n", flush=True)
            if done % 10 == 0:
                print(f"{done * step} calls, {failed} failed, {time.time() - began:.0f} s", flush=True)
    for kind, count in counts.most_common():
        print(f"{count:>7} {kind}   (seeds {examples[kind]})")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, nargs="?", default=500)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--begin", type=int, default=0, help="the first seed")
    asked = parser.parse_args()
    raise SystemExit(main(asked.number, asked.workers, asked.begin))
