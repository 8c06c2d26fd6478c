"""Records group beam search of transformers 4.47: what diverse beam search has to equal.

No test runs it. Run it with that release (used were Python 3.11, torch 2.13 and transformers 4.47.1):

    python tests/support/record_diverse.py tests/support/diverse_recordings.json

The weights of the models come from integer arithmetic, so both releases and all machines have the same ones. A case is
kept if its texts are the same in float32 and in float64: then rounding decides none of them. Most are cases in which
texts of one call end at the length limit and before it.
"""

from __future__ import annotations

import json
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 24
PAD = 3
SPREAD = 0.6
CASES = 150
MODELS = ["gpt2", "llama"]
CHOICES: dict[str, list[Any]] = {
    "beams": [(4, 2), (6, 3), (6, 2), (9, 3), (8, 2), (10, 2), (3, 3)],
    "fewer": [0, 0, 0, 1, 2, 100],  # how many texts less than beams are returned
    "diversity_penalty": [0.3, 1.0, 5.0],
    "length_penalty": [-1.0, 0.0, 1.0, 2.0],
    "early_stopping": [True, False, "never"],
    "eos_token_id": [0, 1, 2, 6, 6],  # how many ids end a text
    "max_new_tokens": [1, 2, 2, 3, 3, 4, 5, 9],
    "processor": [{}, {}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 2}],
    "prompts": [(5,), (7, 4), (3, 5)],  # tokens of each
}


@cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A tiny model with the same weights everywhere."""
    common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": PAD}
    common["tie_word_embeddings"] = False
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **common)
        )
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **common))
    with torch.no_grad():
        for number, (path, parameter) in enumerate(sorted(model.named_parameters())):
            drawn = torch.arange(1, parameter.numel() + 1) + 7919 * number
            for _ in range(3):
                drawn = drawn * 48271 % 2147483647
                drawn = drawn ^ (drawn >> 11)
            drawn = (drawn % 65521).double() / 32760 - 1  # from -1 to 1
            is_scale = parameter.ndim == 1 and path.endswith("weight")
            parameter.copy_(SPREAD * drawn.view_as(parameter) + is_scale)
    return model.eval().to(dtype)


def inputs_of(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Its prompts, padded on the left."""
    columns = max(map(len, case["prompts"]))
    pads = [columns - len(prompt) for prompt in case["prompts"]]
    rows = [[PAD] * some + prompt for some, prompt in zip(pads, case["prompts"], strict=True)]
    masks = [[0] * some + [1] * (columns - some) for some in pads]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def until_end(tokens: list[int], eos_ids: list[int] | None) -> list[int]:
    """Without the end token, of which that release writes the first id whichever came, and what is behind it."""
    ends = [place for place, token in enumerate(tokens) if token in (eos_ids or ())]
    return tokens[: ends[0]] if ends else tokens


def drawn(number: int) -> dict[str, Any]:
    """A case's model, prompts and options."""
    chance = random.Random(number)
    chosen = {name: chance.choice(values) for name, values in CHOICES.items()}
    num_beams, num_beam_groups = chosen.pop("beams")
    returned = max(1, num_beams - chosen.pop("fewer"))
    prompts = [[chance.randrange(4, VOCABULARY) for _ in range(tokens)] for tokens in chosen.pop("prompts")]
    chosen["eos_token_id"] = sorted(chance.sample(range(4, VOCABULARY), chosen["eos_token_id"])) or None
    if "repetition_penalty" in chosen["processor"]:  # that release penalises the ids of pads, later ones do not
        shortest = min(map(len, prompts))
        prompts = [prompt[:shortest] for prompt in prompts]
    groups = {"num_beams": num_beams, "num_beam_groups": num_beam_groups, "num_return_sequences": returned}
    options = groups | chosen.pop("processor") | chosen
    if "min_new_tokens" in options:
        options["min_new_tokens"] = min(options["min_new_tokens"], options["max_new_tokens"])
    return {"model": MODELS[number % len(MODELS)], "prompts": prompts, "options": options}


def recorded(case: dict[str, Any], dtype: torch.dtype) -> tuple[list[list[int]], list[float]]:
    """The new tokens and the scores of all texts. That release cannot return scores in float64: there are none then."""
    inputs, options = inputs_of(case), case["options"]
    scored = dtype == torch.float32
    wanted = {"return_dict_in_generate": True, "output_scores": scored}
    torch.set_default_dtype(dtype)  # that release makes its masks in it
    try:
        out = model_of(case["model"], dtype).generate(**inputs, **options, **wanted, pad_token_id=PAD, do_sample=False)
    finally:
        torch.set_default_dtype(torch.float32)
    prompt = inputs["input_ids"].shape[1]
    texts = [until_end(row, options["eos_token_id"]) for row in out.sequences[:, prompt:].tolist()]
    return texts, out.sequences_scores.tolist() if scored else []


def says_much(case: dict[str, Any], texts: list[list[int]]) -> bool:
    """Whether some texts have ended at the length limit and some before."""
    return len({len(text) == case["options"]["max_new_tokens"] for text in texts}) == 2


def main(path: str) -> None:
    found, number = [], 0
    while len(found) < CASES:
        case = drawn(number)
        number += 1
        texts, scores = recorded(case, torch.float32)
        wanted = number % 8 == 0 or says_much(case, texts)
        if wanted and texts == recorded(case, torch.float64)[0]:
            found.append(case | {"texts": texts, "scores": [round(score, 6) for score in scores]})
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in found)
    Path(path).write_text(f"[\n{lines}\n]\n")
    print(f"{len(found)} cases of {number} drawn; transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main(sys.argv[1])
