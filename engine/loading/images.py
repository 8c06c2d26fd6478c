"""Prompts with images from files, as the model's own processor writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor

from caches.platform.out_of_memory import in_words, is_out_of_memory
from engine.chat_template import Message
from engine.errors import InputError
from engine.loading.location import locate
from engine.prompt import EncodedPrompt


def load_processor(model: str | Path, trust_remote_code: bool) -> Any:
    """The processor of the model at a local path or a hub id. Raises `InputError` where it takes no images."""
    if find_spec("PIL") is None:
        raise InputError("images are read with the package Pillow, which is not installed: pip install pillow")
    path = locate(model)
    with _errors_of_processors(f"{str(model)!r} has no processor of images that can be loaded"):
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    if not hasattr(processor, "image_processor"):
        raise InputError(f"{str(model)!r} takes no images: leave them out, or choose a model that does")
    return processor


def read_prompt(
    processor: Any, prompt: str | Sequence[Message], paths: Sequence[Path], dtype: torch.dtype
) -> EncodedPrompt:
    """The inputs of a model for a prompt with images.

    prompt: a text that has the processor's placeholders, or messages whose contents are texts: the images come before
    that of the last one. dtype: of the pixels. Raises `InputError`.
    """
    images = [_read(path) for path in paths]
    with _errors_of_processors("the model's processor refuses this prompt with images"):
        if isinstance(prompt, str):
            inputs = processor(text=prompt, images=images, return_tensors="pt")
        else:
            contents = [[{"type": "text", "text": message["content"]}] for message in prompt]
            contents[-1][:0] = [{"type": "image", "image": image} for image in images]
            inputs = processor.apply_chat_template(
                [dict(message, content=content) for message, content in zip(prompt, contents, strict=True)],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
    inputs = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    encoded = EncodedPrompt(inputs.pop("input_ids"), is_chat=not isinstance(prompt, str))
    encoded.update(inputs)
    return encoded


@contextmanager
def _errors_of_processors(message: str) -> Iterator[None]:
    """Turn errors into an `InputError` that begins with `message`: processors, and the packages that they need, raise
    what they like."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"{message}: {in_words(error)}") from error


def _read(path: Path) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, SyntaxError, ValueError) as error:
        raise InputError(f"{str(path)!r} is no image that Pillow reads: {in_words(error)}") from error
