"""Tiny random models that see images, one entry per architecture: (configuration, inputs besides ids and mask)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from architectures import WINDOW
from transformers import CONFIG_MAPPING, PreTrainedModel

VOCABULARY, IMAGE, VIDEO, START, END = 110, 100, 101, 102, 103
SPECIAL = list(range(95, VOCABULARY))  # a random model would write image tokens
IMAGES = (1, 2)  # per row

_TEXT = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    tie_word_embeddings=False,
)  # fmt: skip
_VISION = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4
)
_FINE = dict(patch_size=2)
_SIGLIP = _VISION | dict(model_type="siglip_vision_model", vision_use_head=False)
_CLIP = _VISION | dict(model_type="clip_vision_model")
_MIXED = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2)
_QWEN = dict(depth=2, hidden_size=32, num_heads=4, patch_size=4)
_M_ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1]))
_TOKENS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)


def _pixels(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


def _one_tensor(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pixel_values": _pixels(sum(IMAGES), 3, 8, 8)}


def _patches(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    images = sum(IMAGES)
    return {
        "pixel_values": _pixels(16 * images, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * images),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


def _per_row(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    pixels = _pixels(len(IMAGES), max(IMAGES), 3, 8, 8)
    pixels[0, 1] = 0  # an image of padding
    return {"pixel_values": pixels, "pixel_attention_mask": (pixels != 0).any(2).long()}


def _typed(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return _one_tensor(ids) | {"token_type_ids": (ids == IMAGE).long()}


def _prefix(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return _one_tensor(ids) | {"token_type_ids": torch.zeros_like(ids)}


def _text(model_type: str, **more: Any) -> dict[str, Any]:
    return dict(model_type=model_type) | _TEXT | more


_ARRANGED = dict(image_token_index=IMAGE, image_seq_length=4)
# name: (configuration, tokens that stand for an image, further inputs)
MULTIMODAL: dict[str, tuple[dict[str, Any], list[int], Callable]] = {
    "llava": (dict(text_config=_text("llama"), vision_config=_CLIP, **_ARRANGED), [IMAGE] * 4, _one_tensor),
    "aya_vision": (
        dict(text_config=_text("cohere2", **_MIXED), vision_config=_SIGLIP | _FINE, image_token_index=IMAGE),
        [IMAGE] * 4,
        _one_tensor,
    ),
    "idefics3": (
        dict(text_config=_text("llama"), vision_config=_VISION | _FINE, image_token_id=IMAGE, scale_factor=2),
        [IMAGE] * 4,
        _per_row,
    ),
    "paligemma": (
        dict(text_config=_text("gemma"), vision_config=_SIGLIP | dict(projection_dim=32), image_token_index=IMAGE,
             projection_dim=32),
        [IMAGE] * 4,
        _prefix,
    ),
    "gemma3": (
        dict(text_config=_text("gemma3_text", query_pre_attn_scalar=8, **_MIXED), vision_config=_SIGLIP,
             image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END, mm_tokens_per_image=4),
        [START] + [IMAGE] * 4 + [END],
        _typed,
    ),
    "qwen2_vl": (
        dict(text_config=_text("qwen2_vl_text", **_M_ROPE), vision_config=_QWEN | dict(embed_dim=32), **_TOKENS),
        [START] + [IMAGE] * 4 + [END],
        _patches,
    ),
    "qwen2_5_vl": (
        dict(text_config=_text("qwen2_5_vl_text", **_M_ROPE), **_TOKENS,
             vision_config=_QWEN | dict(out_hidden_size=32, intermediate_size=64, window_size=8,
                                        fullatt_block_indexes=[1], tokens_per_second=2)),
        [START] + [IMAGE] * 4 + [END],
        _patches,
    ),
    "qwen3_vl": (
        dict(text_config=_text("qwen3_vl_text", **_M_ROPE), **_TOKENS,
             vision_config=_QWEN | dict(out_hidden_size=32, intermediate_size=64, num_position_embeddings=16,
                                        deepstack_visual_indexes=[0, 1])),
        [START] + [IMAGE] * 4 + [END],
        _patches,
    ),
}  # fmt: skip


@cache
def seeing_model(name: str) -> PreTrainedModel:
    config = CONFIG_MAPPING[name](**MULTIMODAL[name][0])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def seen_prompt(name: str) -> dict[str, torch.Tensor]:
    """Two rows with one and two images between words; the first row is padded."""
    _, image, more = MULTIMODAL[name]
    generator = torch.Generator().manual_seed(0)

    def words(count: int) -> list[int]:
        return torch.randint(2, SPECIAL[0], (count,), generator=generator).tolist()

    rows = [[token for _ in range(images) for token in words(4) + image] + words(5) for images in IMAGES]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask} | more(ids)
