"""Conversations of tiny models, and what every turn of them must be like."""

import torch
from architectures import ARCHITECTURES, MORE_ARCHITECTURES, randomised

import engine
from engine.chat_template import TemplateOptions, chat_ends
from engine.reuse.conversation import flat

TOKENS = 7
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}" \
        "{% if add_generation_prompt %}<assistant>{% endif %}"  # fmt: skip
# What models that think do: the beginning of an answer is not part of the history, and thoughts are dropped from it.
THINKING = "{% for m in messages %}<{{ m.role }}>" \
           "{{ m.content.split('e')[-1] if m.role == 'assistant' else m.content }}" \
           "\n{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"  # fmt: skip


def generator_of(name, tokenizer, template=PLAIN):
    config_class, arguments = (ARCHITECTURES | MORE_ARCHITECTURES)[name]
    tokenizer.chat_template = template
    model = randomised(config_class, arguments | {"vocab_size": len(tokenizer)})
    return engine.Generator(model, tokenizer)


def history_of(chat):
    """The ids of the last turn's prompt."""
    ids = flat(chat._conversation.segments)
    ids = torch.tensor([ids[: len(ids) - len(chat.last.tokens[0])]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check_turn(generator, chat, out, backend, **arguments):
    ends = chat_ends(generator.tokenizer, generator.model.generation_config.eos_token_id)
    fresh = generator.generate(history_of(chat), **backend, eos_token_id=ends, max_new_tokens=TOKENS, **arguments)
    assert out.tokens == fresh.tokens
    assert out.text == fresh.text


def check_history(chat):
    """The last prompt is what the messages say, and all before it but the end of the last answer was read already."""
    conversation = chat._conversation
    expected = conversation._text(chat.messages[:-1], TemplateOptions())
    assert conversation.tokenizer.decode(history_of(chat)["input_ids"][0]) == expected
