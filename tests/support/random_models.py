"""What random calls are made of besides numbers: tiny models, a tokenizer for them, processors and criteria."""

from __future__ import annotations

import copy
from functools import cache

import torch
from architectures import _EXPERTS, _TINY, VOCABULARY, randomised
from encoder_decoders import tiny_encoder_decoder
from helpers import StopAfter as EndsAt  # noqa: F401 - in the scripts of random calls
from references import NoStutter  # noqa: F401
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria

WINDOW = 8
_MIXED = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
_CHUNKED = dict(intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=WINDOW, use_qk_norm=True,
                layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0])  # fmt: skip
_GPT2 = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=None,
             tie_word_embeddings=False)  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", _TINY),
    "mistral": ("MistralConfig", _TINY | dict(sliding_window=WINDOW)),
    "gemma2": ("Gemma2Config", _TINY | _MIXED | dict(query_pre_attn_scalar=8)),
    "qwen3": ("Qwen3Config", _TINY | _MIXED | dict(use_sliding_window=True)),
    "llama4_text": ("Llama4TextConfig", _TINY | _CHUNKED),
    "gpt2": ("GPT2Config", _GPT2),
    "mixtral": ("MixtralConfig", _EXPERTS | dict(sliding_window=None)),
    "mamba": ("MambaConfig", _TINY | dict(state_size=8, time_step_rank=4)),
    "lfm2": ("Lfm2Config", _TINY | dict(layer_types=["conv", "full_attention"], block_multiple_of=16)),
    "t5": None,
    "bart": None,
}

EAGER = ("qwen3", "gpt2", "t5")  # the usual attention returns no weights to compare


@cache
def model(name: str, dtype: torch.dtype = torch.float32, draft: bool = False) -> PreTrainedModel:
    """The model of this name, or one that often says the same."""
    built = tiny_encoder_decoder(name) if MODELS[name] is None else randomised(*MODELS[name])
    built = copy.deepcopy(built).to(dtype)
    if name in EAGER:
        built.set_attn_implementation("eager")
    if draft:
        numbers = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in built.parameters():
                if parameter.ndim >= 2:
                    noise = torch.randn(parameter.shape, generator=numbers, dtype=torch.float64)
                    parameter += 0.05 * parameter.std() * noise.to(dtype)
    return built


LETTERS = {"plain": "abcdef ", "spaces": "abcdef   ", "bytes": "abcdé "}  # that stop strings are made of, by tokenizer


@cache
def tokenizer(kind: str = "plain") -> PreTrainedTokenizerFast:
    """Every id but the first three is a few letters.

    kind: "spaces" leaves out the space that a text begins with, "bytes" has halves of characters.
    """
    letters = "abcdef"
    pieces = [*letters, *(a + b for a in letters for b in letters), *(a + b + a for a in letters for b in letters)]
    pieces += ["abc" + a for a in letters] + ["fed" + a for a in letters] + [" " + a for a in letters] + [" ", "\n"]
    decoder: decoders.Decoder = decoders.Fuse()
    if kind == "spaces":
        spaced = ["▁", *("▁" + a for a in letters), *("▁" + a + b for a in letters for b in letters)]
        pieces = [*letters, *spaced, *pieces]
        decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    if kind == "bytes":
        halves = ["Ã", "©", "¨", "Ã©"]  # é and è are two bytes each
        pieces = [*letters, "Ġ", *halves, *(a + half for a in (*letters, "Ġ", "©") for half in halves),
                  *(half + a for a in (*letters, "Ġ") for half in halves), *pieces]  # fmt: skip
        decoder = decoders.ByteLevel()
    names = ["<pad>", "<s>", "</s>", *dict.fromkeys(pieces)][:VOCABULARY]
    assert len(names) == VOCABULARY, len(names)
    words = Tokenizer(BPE({piece: place for place, piece in enumerate(names)}, []))
    words.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


class Favours:
    """Tokens of this remainder are likelier, in a way that depends on how long the text is."""

    def __init__(self, remainder: int):
        self.remainder = remainder

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        liked = torch.arange(scores.shape[-1]) % 5 == (self.remainder + ids.shape[1]) % 5
        return scores + 2.0 * liked


class EndsBehind(StoppingCriteria):
    """Ends a text behind any token that divides by this number."""

    def __init__(self, divisor: int):
        self.divisor = divisor

    def __call__(self, ids: torch.Tensor, scores: object, **more: object) -> torch.Tensor:
        return ids[:, -1] % self.divisor == 0


def every_other(prompt: int, ids: torch.Tensor) -> list[int]:
    """For `prefix_allowed_tokens_fn`."""
    return list(range(3 + prompt % 2, VOCABULARY, 2))
