"""Tokenizers with chat templates of the kinds that real models have, in words of our own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import engine

_TOOLS = "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
_CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}"
)
# The special tokens of each, the end token of its tokenizer (not always the one that closes a turn), and the template.
CHATML = (  # texts are added up
    ("<|im_start|>", "<|im_end|>"),
    "<|endoftext|>",
    "{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}" + _CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)
LLAMA3 = (
    ("<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"),
    "<|endoftext|>",
    "{{ bos_token }}{% if tools %}<|head|>system<|/head|>\n\n" + _TOOLS + "<|eot|>{% endif %}"
    "{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}" + _CALLS + "<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}",
)
GEMMA = (  # no system role, another name for the assistant, roles in turn
    ("<bos>", "<turn>", "<end_turn>"),
    "<|endoftext|>",
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('there is no role system') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles take turns') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}",
)
MISTRAL = (  # an answer is closed by the end token itself
    ("<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]"),
    "</s>",
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' and loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "{% if m.role in ('user', 'system') %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + (m.content | trim) }}" + _CALLS + "{{ eos_token }}{% endif %}{% endfor %}",
)
KINDS = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
WITHOUT_SYSTEM = ("gemma",)
WITHOUT_TOOLS = ("gemma",)


@functools.cache
def _made(name: str) -> Any:
    special, end, template = KINDS[name]
    tokenizer = AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)
    tokenizer.add_tokens([AddedToken(one, special=True) for one in special])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.eos_token, tokenizer.chat_template = end, template
    if name != "chatml":
        tokenizer.bos_token = special[0]
    return tokenizer


def tokenizer_of(name: str) -> Any:
    """The shipped tokenizer with the special tokens and the template of this kind; a new one for every call."""
    return copy.deepcopy(_made(name))


def closing(name: str) -> str:
    """The token that closes an answer."""
    return {"chatml": "<|im_end|>", "llama3": "<|eot|>", "gemma": "<end_turn>", "mistral": "</s>"}[name]


def of_pieces(template: str) -> Any:
    """A tokenizer as of sentencepiece with byte tokens, whose texts begin with a token, and this template."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += [chr(code) for code in range(33, 127)]
    return sentencepiece(
        pieces, special=("<s>", "</s>"), bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


def sentencepiece(
    pieces: Sequence[str], merges: Sequence[tuple[str, str]] = (), special: Sequence[str] = (), **named: Any
) -> Any:
    """A tokenizer as of sentencepiece: a space before the text, which decoding leaves out.

    merges: pairs of pieces that are one. With a `bos_token` texts begin with it.
    """
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, list(merges), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    if "bos_token" in named:
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, **named)
