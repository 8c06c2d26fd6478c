"""Options of strategies, drafts and guidance that cannot be: refused before any work, with number and remedy."""

import copy

import pytest
import torch
from architectures import tiny_model
from references import draft_of, never_run, tiny
from transformers import AutoTokenizer

import caches
import engine
from strategies import Beam, Contrastive, PromptLookup, Sampling

GROUPS = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}
STRATEGIES = {
    "unequal groups": (GROUPS | {"num_beam_groups": 3}, "num_beams=4 cannot be 3 groups of equal size"),
    "groups without beams": ({"num_beam_groups": 2, "diversity_penalty": 1.0}, "groups need num_beams=2 or more"),
    "no diversity": ({"num_beams": 4, "num_beam_groups": 2}, "diversity_penalty=0.0, and without one over 0 all"),
    "diversity of one group": ({"num_beams": 4, "diversity_penalty": 1.0}, "it is for num_beam_groups=2 or more"),
    "groups that sample": (GROUPS | {"do_sample": True}, "'diverse_beam' contradicts do_sample=True"),
    "no candidates": ({"penalty_alpha": 0.6}, "also needs top_k, how many candidates to compare: give top_k=4"),
    "one candidate": ({"penalty_alpha": 0.6, "top_k": 1}, "contrastive search also needs top_k=2 or more"),
    "one candidate, by name": ({"strategy": "contrastive", "top_k": 1}, "top_k=1, but it needs 2 candidates or more"),
    "alpha too large": ({"penalty_alpha": 1.5, "top_k": 4}, "penalty_alpha=1.5, but it is a number from 0 to 1"),
    "alpha and sampling": ({"penalty_alpha": 0.6, "top_k": 4, "do_sample": True}, "penalty_alpha=0.6 cannot apply"),
    "alpha and beams": ({"penalty_alpha": 0.6, "top_k": 4, "num_beams": 2}, "penalty_alpha=0.6 cannot apply"),
    "more texts than beams": ({"num_beams": 4, "num_return_sequences": 5}, "num_beams=4 end with that many texts"),
    "several greedy": ({"num_return_sequences": 2}, "the same text every time; use do_sample=True, or num_beams"),
    "several contrastive": ({"strategy": "contrastive", "num_return_sequences": 2}, "the same text every time"),
    "no texts": ({"num_beams": 4, "num_return_sequences": 0}, "num_return_sequences=0, but it is a whole number, 1"),
    "no beams": ({"num_beams": 0}, "num_beams=0, but it is a whole number, 1 or more"),
    "half a beam": ({"num_beams": 2.5}, "num_beams=2.5, but it is a whole number"),
    "one beam, by name": ({"strategy": "beam", "num_beams": 1}, "num_beams=1 is greedy search"),
    "early stopping": (
        {"num_beams": 4, "early_stopping": "sometimes"},
        "='sometimes', but it is True, False or 'never'",
    ),
    "early stopping, a number": ({"num_beams": 4, "early_stopping": 1}, "early_stopping=1, but it is True, False or"),
    "early stopping, greedy": ({"early_stopping": True}, "it ends a search with num_beams=2 or more"),
    "a penalty in words": (
        {"num_beams": 4, "length_penalty": "long"},
        "penalty='long', but it is a finite number",
    ),
    "a penalty, greedy": ({"length_penalty": 2.0}, "it compares the texts of beams; give num_beams=2 or more"),
    "warm beams": ({"num_beams": 4, "temperature": 0.5}, "applies to sampling, but beam draws nothing"),
    "beams by greedy": ({"strategy": "greedy", "num_beams": 4}, "num_beams=4 cannot apply: greedy has no use for it"),
    "a misspelt name": ({"strategy": "beem"}, "no strategy named 'beem'; did you mean 'beam'"),
    "an object, other beams": ({"strategy": Beam(4), "num_beams": 2}, "num_beams=2 contradicts the strategy"),
    "an object, no beams": ({"strategy": Beam(4), "num_beams": 1}, "num_beams=1 contradicts the strategy"),
    "an object that stops early": (
        {"strategy": Beam(early_stopping=True), "early_stopping": False},
        "early_stopping=False contradicts the strategy",
    ),
    "an object, other candidates": ({"strategy": Contrastive(), "top_k": 50}, "top_k=50 contradicts the strategy"),
    "an object, more texts": ({"strategy": Sampling(), "num_return_sequences": 3}, "contradicts the strategy"),
    "an object that draws nothing": ({"strategy": Beam(4), "do_sample": True}, "'beam' contradicts do_sample=True"),
    "an object that draws": ({"strategy": Beam(do_sample=True), "do_sample": False}, "contradicts do_sample=False"),
}


def smaller(name, **changes):
    model = copy.deepcopy(tiny_model(name))
    for key, value in changes.items():
        setattr(model.config, key, value)
    return model


DRAFT = {"assistant_model": lambda: draft_of("llama")}
DRAFTS = {
    "another vocabulary": ({"assistant_model": lambda: smaller("llama", vocab_size=77)},
                           "a vocabulary of 77 tokens and the model one of 101: give tokenizer= and assistant_token"),
    "few positions": ({"assistant_model": lambda: smaller("llama", max_position_embeddings=20)},
                      "the draft has 20 positions, but 13 prompt tokens and 20 new ones need 32: ask for fewer"),
    "training": ({"assistant_model": lambda: copy.deepcopy(tiny_model("llama")).train()},
                 "assistant_model: the model is in training mode.*model.eval()"),
    "a path": ({"assistant_model": lambda: "gpt2"}, "^assistant_model: .*gpt2"),
    "an encoder": ({"assistant_model": lambda: tiny("t5")[0]}, "the draft has an encoder and the model has none"),
    "beams": (DRAFT | {"num_beams": 3}, "to greedy search and sampling, and beam is neither: leave one of them out"),
    "contrastive": (DRAFT | {"penalty_alpha": 0.6, "top_k": 4}, "and contrastive is neither"),
    "greedy by name": (DRAFT | {"strategy": "greedy"}, "and greedy is neither"),
    "both": (DRAFT | {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 both propose tokens: leave one"),
    "lookup by name": (DRAFT | {"strategy": "prompt_lookup"}, "and prompt_lookup is neither"),
    "no draft": ({"strategy": "assisted"}, "strategy='assisted' is for a draft .*: give one as assistant_model"),
    "only its tokenizer": ({"assistant_tokenizer": lambda: AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)},
                           "_tokenizer is for a draft"),
    "its length alone": ({"num_assistant_tokens": 3}, "greedy has no use for it: it is for assistant_model"),
    "words alone": ({"max_matching_ngram_size": 3}, "greedy has no use for it: it is for prompt_lookup_num_tokens"),
    "lookup and beams": ({"prompt_lookup_num_tokens": 3, "num_beams": 2}, "beam has no use for it: it proposes tokens"),
    "early exit": ({"assistant_early_exit": 2}, "assistant_early_exit=2 cannot apply: .*give a smaller assistant_mod"),
    "heads": ({"use_mtp": True}, "use_mtp=True cannot apply: .* give an assistant_model"),
    "ensemble": (DRAFT | {"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight=0.5 cannot apply: .*text"),
    "lookbehind": (DRAFT | {"assistant_lookbehind": 3}, "assistant_lookbehind=3 cannot apply: .* leave it out"),
    "several": (DRAFT | {"do_sample": True, "num_return_sequences": 2}, "num_return_sequences=2 cannot apply"),
    "no tokens": (DRAFT | {"num_assistant_tokens": 0}, "num_assistant_tokens=0, but it is a whole number, 1 or more"),
    "a schedule": (DRAFT | {"num_assistant_tokens_schedule": "often"}, "'often', but it is one of constant, heuristic"),
    "a threshold": (DRAFT | {"assistant_confidence_threshold": 2.0}, "threshold=2.0, but it is a probability"),
    "a long lookup": ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": -1}, "size=-1, but it is a whole"),
    "half a token": ({"prompt_lookup_num_tokens": 2.5}, "prompt_lookup_num_tokens=2.5, but it is a whole number"),
    "two numbers": ({"strategy": PromptLookup(3), "prompt_lookup_num_tokens": 4}, "contradicts the strategy"),
}  # fmt: skip  # fmt: skip
IDS = {"negative_prompt_ids": torch.tensor([[4, 5]])}
PADS_ALONE = {
    "negative_prompt_ids": torch.tensor([[4, 5], [0, 0]]),
    "negative_prompt_attention_mask": torch.tensor([[1, 1], [0, 0]]),
}
GUIDANCE = {
    "no scale": (IDS, "negative_prompt_ids cannot apply: guidance_scale=None means no guidance"),
    "a scale of 1": (IDS | {"guidance_scale": 1.0}, "guidance_scale=1.0 means no guidance"),
    "text without a scale": ({"negative_prompt": "no"}, "negative_prompt cannot apply"),
    "a mask alone": (
        {"guidance_scale": 2, "negative_prompt_attention_mask": torch.ones(1, 2)},
        "the mask of negative_prompt_ids, which were not given",
    ),
    "both": (IDS | {"guidance_scale": 2, "negative_prompt": "no"}, "both say what to steer away from"),
    "words": ({"guidance_scale": "2"}, "guidance_scale='2', but it is a finite number"),
    "yes": ({"guidance_scale": True, "negative_prompt": "no"}, "means no guidance|finite number"),
    "infinite": ({"guidance_scale": float("inf")}, "guidance_scale=inf, but it is a finite number"),
    "too many": (
        {"guidance_scale": 2, "negative_prompt_ids": torch.ones(3, 2).long()},
        "3 negative prompts for 2 prompts",
    ),
    "empty": ({"guidance_scale": 2, "negative_prompt_ids": torch.ones(2, 0).long()}, "row 0 of 2 is empty"),
    "pads alone": ({"guidance_scale": 2} | PADS_ALONE, "row 1 of 2 is empty"),
    "pads behind": (
        IDS | {"guidance_scale": 2, "negative_prompt_attention_mask": torch.tensor([[1, 0]])},
        "padded on the right, where the text goes on: pad on the left",
    ),
    "another mask": (
        IDS | {"guidance_scale": 2, "negative_prompt_attention_mask": torch.ones(1, 3)},
        r"has shape \[1, 3\], but the ids have \[1, 2\]",
    ),
    "unknown ids": ({"guidance_scale": 2, "negative_prompt_ids": [[4, 500]]}, "token id 500 is outside"),
    "text without a tokenizer": (
        {"guidance_scale": 2, "negative_prompt": "no"},
        "negative_prompt: a text prompt needs",
    ),
    "numbers": ({"guidance_scale": 2, "negative_prompt_ids": torch.rand(2, 2)}, "negative_prompt_ids: token ids are"),
    "a cache for fewer rows": (
        {"guidance_scale": 2, "cache": "static", "cache_config": {"max_batch_size": 3}},
        "2 prompts are to become 4 rows, but this static cache has room for 3",
    ),
    "positions": (
        {"guidance_scale": 2, "position_ids": torch.arange(13).expand(2, -1)},
        "in place of position_ids, and nothing says so",
    ),
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(*case, id=f"{subject}: {name}")
        for subject, cases in (("strategy", STRATEGIES), ("draft", DRAFTS), ("guidance", GUIDANCE))
        for name, case in cases.items()
    ],
)
def test_wrong_options_are_refused_before_any_work(options, message, monkeypatch):
    model, inputs = tiny("llama")
    options = {name: value() if name.startswith("assistant") and callable(value) else value
               for name, value in options.items()}  # fmt: skip
    never_run(model, monkeypatch)
    with pytest.raises((engine.OptionError, engine.InputError, engine.ConfigError, caches.CacheError), match=message):
        engine.generate(model, inputs, **options)
