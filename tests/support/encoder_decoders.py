"""Tiny random encoder-decoder models, one entry per architecture, and what their encoders read.

T5 and its kin have as many decoder as encoder layers here: transformers sizes their cache by the encoder's, and fails
where the decoder has more.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 101
WINDOW = 8
START = 2  # what the decoder begins with
IMAGE = 99

_SPECIAL = dict(bos_token_id=1, eos_token_id=None, pad_token_id=0, decoder_start_token_id=START)
_ROTARY = dict(rope_type="default", rope_theta=10000.0)
_MIXED = ["sliding_attention", "full_attention"]
_T5 = _SPECIAL | dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=3,
                      num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=24)  # fmt: skip
_BART = _SPECIAL | dict(
    vocab_size=VOCABULARY, d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64,
    decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=64, max_position_embeddings=256,
    forced_eos_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
_TINY = _SPECIAL | dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False,
)  # fmt: skip
_WINDOWS = _TINY | dict(sliding_window=WINDOW, layer_types=_MIXED * 2, query_pre_attn_scalar=8)
_BERT = dict(model_type="bert", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
             num_attention_heads=4, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
             tie_word_embeddings=False)  # fmt: skip
_DECODES = dict(is_decoder=True, add_cross_attention=True)
_VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16,
               patch_size=8)  # fmt: skip
_GPT2 = dict(model_type="gpt2", vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=256, bos_token_id=1,
             eos_token_id=None, tie_word_embeddings=False, add_cross_attention=True)  # fmt: skip
_CONVOLVED = dict(conv_dim=[16, 16], conv_kernel=[10, 4], conv_stride=[5, 4], num_conv_pos_embeddings=16,
                  num_conv_pos_embedding_groups=2, mask_time_prob=0.0, apply_spec_augment=False)  # fmt: skip
_SWIN = dict(model_type="donut-swin", image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4],
             window_size=4)  # fmt: skip
_PARAKEET = dict(model_type="parakeet_encoder", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                 num_attention_heads=4, num_mel_bins=16, subsampling_conv_channels=8, subsampling_factor=4,
                 conv_kernel_size=3, max_position_embeddings=256, layerdrop=0.0)  # fmt: skip
# name: (configuration class, its arguments); the first five are the default
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5Config", _T5),
    "t5_gated": ("T5Config", _T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "bart": ("BartConfig", _BART),
    "m2m_100": ("M2M100Config", _BART),
    "whisper": ("WhisperConfig", _BART | dict(num_mel_bins=16, max_source_positions=12, max_target_positions=256,
                                              suppress_tokens=None, begin_suppress_tokens=None)),
    # rare: text
    "bart_tied": ("BartConfig", _BART | dict(tie_word_embeddings=True, scale_embedding=True)),
    "bigbird_pegasus": ("BigBirdPegasusConfig", _BART | dict(attention_type="original_full")),
    "blenderbot": ("BlenderbotConfig", _BART | dict(encoder_no_repeat_ngram_size=0)),
    "blenderbot_small": ("BlenderbotSmallConfig", _BART),
    "encoder_decoder": ("EncoderDecoderConfig", _SPECIAL | dict(encoder=_BERT, decoder=_BERT | _DECODES)),
    "encoder_decoder_gpt2": ("EncoderDecoderConfig", _SPECIAL | dict(encoder=_BERT, decoder=_GPT2)),
    "fsmt": ("FSMTConfig", _BART | dict(langs=["en", "de"], src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY,
                                        num_beams=1)),
    "led": ("LEDConfig", _BART | dict(attention_window=4, max_encoder_position_embeddings=256,
                                      max_decoder_position_embeddings=256)),
    "longt5": ("LongT5Config", _T5 | dict(feed_forward_proj="gated-gelu", local_radius=3)),
    "longt5_global": ("LongT5Config", _T5 | dict(feed_forward_proj="gated-gelu", local_radius=3,
                                                 global_block_size=4,
                                                 encoder_attention_type="transient-global")),
    "marian": ("MarianConfig", _BART | dict(decoder_vocab_size=VOCABULARY)),
    "mbart": ("MBartConfig", _BART),
    "mt5": ("MT5Config", _T5 | dict(feed_forward_proj="gated-gelu")),
    "mvp": ("MvpConfig", _BART),
    "nllb_moe": ("NllbMoeConfig", _BART | dict(num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2,
                                               expert_capacity=64)),
    "pegasus": ("PegasusConfig", _BART),
    "pegasus_x": ("PegasusXConfig", _BART | dict(num_global_tokens=2, block_size=4)),
    "plbart": ("PLBartConfig", _BART),
    "prophetnet": ("ProphetNetConfig", _SPECIAL | dict(
        vocab_size=VOCABULARY, hidden_size=32, encoder_ffn_dim=64, num_encoder_layers=3, num_encoder_attention_heads=4,
        decoder_ffn_dim=64, num_decoder_layers=3, num_decoder_attention_heads=4, max_position_embeddings=256,
        num_buckets=8, relative_max_distance=24, tie_word_embeddings=False)),
    "switch_transformers": ("SwitchTransformersConfig", _T5 | dict(
        num_decoder_layers=3, num_experts=4, expert_capacity=512, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1)),
    "t5gemma": ("T5GemmaConfig", _SPECIAL | dict(encoder=_WINDOWS, decoder=_WINDOWS, vocab_size=VOCABULARY,
                                                 tie_word_embeddings=False)),
    "t5gemma2": ("T5Gemma2Config", _SPECIAL | dict(
        encoder=dict(text_config=_WINDOWS, vision_config=_VISION | dict(model_type="siglip_vision_model"),
                     mm_tokens_per_image=4, boi_token_index=97, eoi_token_index=98, image_token_index=IMAGE),
        decoder=_WINDOWS, image_token_index=IMAGE, eoi_token_index=98, tie_word_embeddings=False)),
    "udop": ("UdopConfig", _T5 | dict(
        feed_forward_proj="gated-gelu", relative_attention_num_buckets=32, relative_attention_max_distance=128,
        image_size=16, patch_size=8, max_2d_position_embeddings=32)),
    "umt5": ("UMT5Config", _T5 | dict(feed_forward_proj="gated-gelu")),
    # rare: speech
    "canary": ("CanaryConfig", _SPECIAL | dict(
        encoder_config=_PARAKEET, decoder_config=_TINY | dict(num_hidden_layers=3, num_key_value_heads=4),
        vocab_size=VOCABULARY, tie_word_embeddings=False)),
    "cohere_asr": ("CohereAsrConfig", _TINY | dict(encoder_config=_PARAKEET | dict(hidden_size=16),
                                                   num_hidden_layers=3)),
    "moonshine": ("MoonshineConfig", _SPECIAL | dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=3, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
        decoder_num_key_value_heads=2, max_position_embeddings=256, partial_rotary_factor=0.5,
        tie_word_embeddings=False)),
    "moonshine_streaming": ("MoonshineStreamingConfig", _TINY | dict(
        num_hidden_layers=3, num_key_value_heads=4, encoder_config=dict(
            hidden_size=24, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            head_dim=8, max_position_embeddings=256, sample_rate=1600, sliding_windows=[[4, 2], [4, 0]]))),
    "speech_encoder_decoder": ("SpeechEncoderDecoderConfig", _SPECIAL | dict(
        encoder=dict(model_type="wav2vec2", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, layerdrop=0.0, **_CONVOLVED),
        decoder=_BART | dict(model_type="bart", encoder_layers=3, is_encoder_decoder=False, **_DECODES))),
    "speech_to_text": ("Speech2TextConfig", _BART | dict(
        max_source_positions=256, max_target_positions=256, conv_channels=16, conv_kernel_sizes=[3, 3],
        input_feat_per_channel=16)),
    "speecht5": ("SpeechT5Config", _SPECIAL | dict(
        vocab_size=VOCABULARY, hidden_size=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=64, max_text_positions=256,
        tie_word_embeddings=False, **_CONVOLVED)),
    # rare: images
    "florence2": ("Florence2Config", _SPECIAL | dict(
        vision_config=dict(depths=[1, 1], patch_size=[7, 3], patch_stride=[4, 2], patch_padding=[3, 1],
                           patch_prenorm=[False, True], embed_dim=[16, 32], num_heads=[2, 4], num_groups=[2, 4],
                           window_size=2, projection_dim=32, max_temporal_embeddings=4, max_position_embeddings=8),
        text_config=_BART | dict(model_type="bart"), image_token_id=IMAGE, tie_word_embeddings=False)),
    "pix2struct": ("Pix2StructConfig", _SPECIAL | dict(
        text_config=_SPECIAL | dict(
            vocab_size=VOCABULARY, hidden_size=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4,
            relative_attention_num_buckets=8, relative_attention_max_distance=24),
        vision_config=dict(hidden_size=32, patch_embed_hidden_size=12, d_kv=8, d_ff=64, num_hidden_layers=2,
                           num_attention_heads=4, seq_len=64))),
    "pp_formulanet": ("PPFormulaNetConfig", _SPECIAL | dict(
        vision_config=dict(hidden_size=16, output_channels=16, num_hidden_layers=2, num_attention_heads=2,
                           image_size=64, patch_size=8, window_size=2, global_attn_indexes=[1], mlp_dim=32,
                           post_conv_in_channels=16, post_conv_mid_channels=16, post_conv_out_channels=16,
                           decoder_hidden_size=32),
        text_config=_BART)),
    "vision_encoder_decoder_trocr": ("VisionEncoderDecoderConfig", _SPECIAL | dict(
        encoder=_VISION | dict(model_type="vit"), decoder=_BART | _DECODES | dict(
            model_type="trocr", is_encoder_decoder=False, cross_attention_hidden_size=32))),
    "vision_encoder_decoder_gpt2": ("VisionEncoderDecoderConfig", _SPECIAL | dict(
        encoder=_VISION | dict(model_type="vit"), decoder=_GPT2)),
    "vision_encoder_decoder_donut": ("VisionEncoderDecoderConfig", _SPECIAL | dict(
        encoder=_SWIN,
        decoder=_BART | _DECODES | dict(model_type="mbart", encoder_layers=3, is_encoder_decoder=False))),
}  # fmt: skip
DEFAULT = list(ENCODER_DECODERS)[:5]
RARE = list(ENCODER_DECODERS)[5:]

# The automatic class, where it is not AutoModelForSeq2SeqLM
_SPEECH = ["whisper", "canary", "cohere_asr", "moonshine", "moonshine_streaming", "speech_encoder_decoder",
           "speech_to_text", "speecht5"]  # fmt: skip
_IMAGES = ["florence2", "pix2struct", "pp_formulanet", "udop", "vision_encoder_decoder_trocr",
           "vision_encoder_decoder_gpt2", "vision_encoder_decoder_donut"]  # fmt: skip
_AUTO = dict.fromkeys(_SPEECH, "AutoModelForSpeechSeq2Seq") | dict.fromkeys(_IMAGES, "AutoModelForImageTextToText")
# The deviations of the matrices, of the embeddings and of what makes queries and keys: chosen so that no text is
# constant or periodic, and that every text depends on the source, on the cross-attention keys and on its own history.
_DEVIATIONS: dict[str, tuple[float, float, float]] = {
    **dict.fromkeys(["prophetnet"], (0.2, 0.05, 2.0)),
    **dict.fromkeys([
        "longt5_global", "mt5", "speech_encoder_decoder", "t5_gated", "umt5"
    ], (0.2, 0.1, 0.6)),
    **dict.fromkeys(["canary", "t5gemma2"], (0.2, 0.3, 1.0)),
    **dict.fromkeys([
        "bart", "bart_tied", "blenderbot_small", "encoder_decoder", "florence2", "fsmt", "led", "marian", "mvp",
        "plbart", "vision_encoder_decoder_trocr"
    ], (0.2, 1.0, 1.0)),
    **dict.fromkeys(["speecht5"], (0.2, 2.0, 0.6)),
    **dict.fromkeys(["longt5"], (0.3, 0.1, 0.3)),
    **dict.fromkeys(["switch_transformers"], (0.3, 0.1, 0.6)),
    **dict.fromkeys(["t5"], (0.3, 0.2, 0.3)),
    **dict.fromkeys([
        "cohere_asr", "encoder_decoder_gpt2", "pegasus_x", "pp_formulanet"
    ], (0.3, 1.0, 0.6)),
    **dict.fromkeys(["udop"], (0.5, 0.05, 0.2)),
}  # fmt: skip
_USUAL = (0.3, 1.0, 1.0)
_EMBEDS = ("embed", "shared", "wte", "wpe")
_ASKS = ("q_proj", "k_proj", "query", "key", ".q.", ".k.", "relative_attention_bias")
_SEEDS: dict[str, int] = {"switch_transformers": 2, "bart_tied": 3, "encoder_decoder": 1, "prophetnet": 1, "t5": 3}


@cache
def tiny_encoder_decoder(name: str) -> PreTrainedModel:
    """The architecture's model, float32, seeded; every matrix with a deviation that makes attention matter."""
    config_class, arguments = ENCODER_DECODERS[name]
    config = getattr(transformers, config_class)(**deepcopy(arguments))  # 5.17 changes them
    with torch.random.fork_rng():
        torch.manual_seed(_SEEDS.get(name, 0))
        auto = getattr(transformers, _AUTO.get(name, "AutoModelForSeq2SeqLM"))
        model = auto.from_config(config).eval()
        matrices, embeddings, questions = _DEVIATIONS.get(name, _USUAL)
        for label, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                embeds, asks = (any(part in label for part in parts) for parts in (_EMBEDS, _ASKS))
                torch.nn.init.normal_(parameter, std=embeddings if embeds else questions if asks else matrices)
    generation = model.generation_config
    for special in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "suppress_tokens",
                    "begin_suppress_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_length",
                    "num_beams", "early_stopping", "length_penalty", "max_new_tokens"):  # fmt: skip
        if getattr(generation, special, None) is not None:
            setattr(generation, special, None)
    generation.use_cache = True  # pix2struct says no
    generation.pad_token_id, generation.bos_token_id, generation.decoder_start_token_id = 0, 1, START
    return model


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 1))


def _padding(rows: int, length: int, pads: int) -> torch.Tensor:
    """A mask whose first row ends in padding: encoders are padded on the right."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length - pads :] = 0
    return mask


def _text(rows: int, seed: int, tokens: int = 13, pads: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 95, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = _padding(rows, tokens, pads)
    return {"input_ids": ids * mask, "attention_mask": mask}


def _layout(rows: int, seed: int) -> dict[str, torch.Tensor]:
    corners = torch.rand(rows, 13, 2, generator=torch.Generator().manual_seed(seed)) * 0.5
    return _text(rows, seed) | {"bbox": torch.cat([corners, corners + 0.3], -1)}


def _described_image(rows: int, seed: int) -> dict[str, torch.Tensor]:
    inputs = _text(rows, seed, tokens=18)
    inputs["input_ids"][:, :5] = IMAGE
    return inputs | {"pixel_values": _random((rows, 3, 16, 16), seed)}


def _features(frames: int, bins: int, pads: int = 0, last: str = "bins") -> Callable:
    def build(rows: int, seed: int) -> dict[str, torch.Tensor]:
        if last == "frames":
            return {"input_features": _random((rows, bins, frames), seed)}
        mask = _padding(rows, frames, pads)
        return {"input_features": _random((rows, frames, bins), seed) * mask[..., None], "attention_mask": mask}

    return build


def _waves(samples: int, pads: int) -> Callable:
    def build(rows: int, seed: int) -> dict[str, torch.Tensor]:
        mask = _padding(rows, samples, pads)
        return {"input_values": _random((rows, samples), seed) * mask, "attention_mask": mask}

    return build


def _pixels(size: int) -> Callable:
    return lambda rows, seed: {"pixel_values": _random((rows, 3, size, size), seed)}


def _patches(rows: int, seed: int) -> dict[str, torch.Tensor]:
    mask = _padding(rows, 12, 4)
    places = torch.stack([torch.arange(12) // 4 + 1, torch.arange(12) % 4 + 1], -1).float().expand(rows, 12, 2)
    patches = torch.cat([places, _random((rows, 12, 12), seed)], -1)
    return {"flattened_patches": patches * mask[..., None], "attention_mask": mask}


_SOURCES: dict[str, Callable[[int, int], dict[str, torch.Tensor]]] = {
    "whisper": _features(24, 16, last="frames"),
    "canary": _features(48, 16, 16),
    "cohere_asr": _features(48, 16, 16),
    "moonshine": _waves(4000, 1200),
    "moonshine_streaming": _waves(400, 120),
    "speech_encoder_decoder": _waves(400, 120),
    "speech_to_text": _features(48, 16, 16),
    "speecht5": _waves(400, 120),
    "florence2": _described_image,
    "pix2struct": _patches,
    "pp_formulanet": _pixels(64),
    "udop": _layout,
    "vision_encoder_decoder_trocr": _pixels(16),
    "vision_encoder_decoder_gpt2": _pixels(16),
    "vision_encoder_decoder_donut": _pixels(32),
}


def source(name: str, rows: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the encoder reads; where it can be padded, the first row is, on the right."""
    return _SOURCES.get(name, _text)(rows, seed)
