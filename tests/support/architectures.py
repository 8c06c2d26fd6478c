"""Tiny random models, one line per architecture: what every comparison with transformers runs on."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from transformers import PreTrainedModel

import caches

VOCABULARY = 101
WINDOW = 8

_TINY = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    tie_word_embeddings=False,
)  # fmt: skip
_MIXED = ["sliding_attention", "full_attention"]
_GPT2 = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=None,
             tie_word_embeddings=False)  # fmt: skip

# name: (configuration class, its arguments)
ARCHITECTURES = {
    "llama": ("LlamaConfig", _TINY | dict(num_hidden_layers=4)),
    "mistral": ("MistralConfig", _TINY | dict(num_hidden_layers=4, sliding_window=WINDOW)),
    "gemma2": ("Gemma2Config", _TINY | dict(sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=8)),
    "gpt2": ("GPT2Config", _GPT2),
    "opt": ("OPTConfig", _TINY | dict(ffn_dim=64, word_embed_proj_dim=32)),
    "phi3": ("Phi3Config", _TINY | dict(sliding_window=WINDOW)),
    "qwen3": ("Qwen3Config", _TINY | dict(use_sliding_window=True, sliding_window=WINDOW, layer_types=_MIXED)),
    "llama4_text": (
        "Llama4TextConfig",
        _TINY | dict(intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=WINDOW, use_qk_norm=True,
                     layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0]),
    ),
}  # fmt: skip

_WINDOWS = _TINY | dict(sliding_window=WINDOW, layer_types=_MIXED)
_EXPERTS = _TINY | dict(num_local_experts=4, num_experts_per_tok=2)
_NO_HEAD_DIM = {name: value for name, value in _TINY.items() if name != "head_dim"}
_LATENT = _TINY | dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4
)
_DEEPSEEK = _LATENT | dict(
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
_LAYERS = dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=None)
_GEMMA3N = _TINY | dict(
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"] * 3,
    num_hidden_layers=6,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCABULARY,
    laurel_rank=8,
    altup_num_inputs=2,
    intermediate_size=[64] * 6,
    activation_sparsity_pattern=[0.0] * 6,
)
_XGLM = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    ffn_dim=64,
    num_layers=3,
    attention_heads=4,
    max_position_embeddings=256,
    eos_token_id=None,
)
_MPT = dict(
    vocab_size=VOCABULARY, d_model=32, n_layers=3, n_heads=4, max_seq_len=256, bos_token_id=1, eos_token_id=None
)
_NEO = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    window_size=WINDOW,
    attention_types=[[["global", "local"], 1]],
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=None,
)

# More of them, for the comparison with transformers only.
MORE_ARCHITECTURES = {
    "apertus": ("ApertusConfig", _TINY),
    "arcee": ("ArceeConfig", _TINY),
    "biogpt": ("BioGptConfig", _TINY),
    "bloom": ("BloomConfig", _LAYERS),
    "codegen": ("CodeGenConfig", _GPT2 | dict(rotary_dim=4)),
    "cohere": ("CohereConfig", _TINY),
    "cohere2": ("Cohere2Config", _WINDOWS),
    "ctrl": ("CTRLConfig", _GPT2 | dict(dff=64)),
    "deepseek_v2": ("DeepseekV2Config", _DEEPSEEK),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK),
    "deepseek_v32": ("DeepseekV32Config", _DEEPSEEK | dict(index_n_heads=4, index_head_dim=16, index_topk=6)),
    "ernie4_5": ("Ernie4_5Config", _TINY),
    "exaone4": ("Exaone4Config", _WINDOWS),
    "falcon": ("FalconConfig", _NO_HEAD_DIM | dict(new_decoder_architecture=True, num_kv_heads=2)),
    "falcon_alibi": ("FalconConfig", _NO_HEAD_DIM | dict(alibi=True, multi_query=False)),
    "gemma": ("GemmaConfig", _TINY),
    "gemma3_text": ("Gemma3TextConfig", _WINDOWS | dict(query_pre_attn_scalar=8)),
    "gemma3n_text": ("Gemma3nTextConfig", _GEMMA3N),
    "glm": ("GlmConfig", _TINY | dict(partial_rotary_factor=0.5)),
    "glm4": ("Glm4Config", _TINY | dict(partial_rotary_factor=0.5)),
    "glm4_moe": ("Glm4MoeConfig", _TINY | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT2),
    "gpt_neo": ("GPTNeoConfig", _NEO),
    "gpt_neox": ("GPTNeoXConfig", _TINY),
    "gpt_oss": ("GptOssConfig", _EXPERTS | dict(sliding_window=WINDOW, layer_types=_MIXED,
                                                rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
    "gptj": ("GPTJConfig", _GPT2 | dict(rotary_dim=4)),
    "granite": ("GraniteConfig", _TINY),
    "granitemoe": ("GraniteMoeConfig", _EXPERTS),
    "helium": ("HeliumConfig", _TINY),
    "minicpm3": ("MiniCPM3Config", _LATENT),
    "mixtral": ("MixtralConfig", _EXPERTS | dict(sliding_window=WINDOW)),
    "mpt": ("MptConfig", _MPT),
    "nemotron": ("NemotronConfig", _TINY),
    "olmo": ("OlmoConfig", _TINY),
    "olmo2": ("Olmo2Config", _TINY),
    "olmo3": ("Olmo3Config", _WINDOWS),
    "persimmon": ("PersimmonConfig", _TINY),
    "phi": ("PhiConfig", _TINY),
    "phimoe": ("PhimoeConfig", _EXPERTS),
    "qwen2": ("Qwen2Config", _WINDOWS | dict(use_sliding_window=True)),
    "qwen2_moe": ("Qwen2MoeConfig", _TINY | dict(num_experts=4, moe_intermediate_size=32)),
    "qwen3_moe": ("Qwen3MoeConfig", _TINY | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    "seed_oss": ("SeedOssConfig", _TINY),
    "smollm3": ("SmolLM3Config", _TINY | dict(no_rope_layers=[1, 0])),
    "stablelm": ("StableLmConfig", _TINY),
    "starcoder2": ("Starcoder2Config", _TINY | dict(sliding_window=WINDOW)),
    "xglm": ("XGLMConfig", _XGLM),
}  # fmt: skip


_BART = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    encoder_layers=3,
    decoder_layers=3,
    decoder_attention_heads=4,
    decoder_ffn_dim=64,
    max_position_embeddings=256,
    is_encoder_decoder=False,
    is_decoder=True,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
    tie_word_embeddings=False,
)
_BERT = _NO_HEAD_DIM | dict(is_decoder=True)
_MOE = _TINY | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
_MOE_WINDOWS = _MOE | dict(sliding_window=WINDOW, layer_types=_MIXED, num_local_experts=4)
_INDEXED = _DEEPSEEK | dict(index_n_heads=4, index_head_dim=16, index_topk=6)
_GEMMA4 = _GEMMA3N | dict(intermediate_size=64, vocab_size_per_layer_input=VOCABULARY)
_VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)
_QWEN35 = _TINY | dict(layer_types=["full_attention"] * 2)

# And those that share their attention with one above, or are rarely met: too many for the default tests.
RARE_ARCHITECTURES = {
    "afmoe": ("AfmoeConfig", _MOE_WINDOWS),
    "aria_text": ("AriaTextConfig", _TINY),
    "axk1": ("AXK1Config", _DEEPSEEK),
    "bart": ("BartConfig", _BART),
    "beam": ("BeamConfig", _MOE_WINDOWS | dict(n_group=1, topk_group=1)),
    "bert": ("BertConfig", _BERT),
    "bert_generation": ("BertGenerationConfig", _BERT),
    "big_bird": ("BigBirdConfig", _BERT | dict(attention_type="original_full")),
    "bigbird_pegasus": ("BigBirdPegasusConfig", _BART),
    "bitnet": ("BitNetConfig", _TINY),
    "blenderbot": ("BlenderbotConfig", _BART),
    "blenderbot_small": ("BlenderbotSmallConfig", _BART),
    "camembert": ("CamembertConfig", _BERT),
    "cohere2_moe": ("Cohere2MoeConfig", _MOE_WINDOWS),
    "cohere_compass_text": ("CohereCompassTextConfig", _WINDOWS | dict(rope_parameters={kind: dict(rope_type="default", rope_theta=10000.0) for kind in _MIXED})),
    "cwm": ("CwmConfig", _WINDOWS),
    "data2vec_text": ("Data2VecTextConfig", _BERT),
    "dbrx": ("DbrxConfig", _LAYERS | dict(d_model=32, n_heads=4, n_layers=3, max_seq_len=256, attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8), ffn_config=dict(hidden_size=32, ffn_hidden_size=32, moe_top_k=2))),
    "diffllama": ("DiffLlamaConfig", _TINY),
    "doge": ("DogeConfig", _TINY | dict(keep_window_size=8)),
    "doge_moe": ("DogeConfig", _TINY | dict(keep_window_size=8, is_moe=True, num_experts=4, num_experts_per_tok=2)),
    "dots1": ("Dots1Config", _WINDOWS | dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32)),
    "electra": ("ElectraConfig", _BERT),
    "emu3": ("Emu3Config", dict(text_config=_TINY, vq_config=dict(base_channels=32, channel_multiplier=[1], num_res_blocks=1), vocabulary_map={})),
    "ernie": ("ErnieConfig", _BERT),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", _MOE | dict(moe_num_experts=4, moe_k=2)),
    "exaone_moe": ("ExaoneMoeConfig", _MOE_WINDOWS),
    "flex_olmo": ("FlexOlmoConfig", _MOE),
    "flint": ("FlintConfig", _MOE_WINDOWS),
    "fuyu": ("FuyuConfig", dict(text_config=_TINY | dict(model_type="persimmon"), patch_size=2)),
    "gemma3": ("Gemma3Config", dict(text_config=_WINDOWS | dict(query_pre_attn_scalar=8), vision_config=_VISION, image_token_index=99, mm_tokens_per_image=4, tie_word_embeddings=False)),
    "gemma4": ("Gemma4Config", dict(text_config=_GEMMA4, image_token_id=99, audio_token_id=98, video_token_id=97, tie_word_embeddings=False)),
    "gemma4_text": ("Gemma4TextConfig", _GEMMA4),
    "gemma4_text_moe": ("Gemma4TextConfig", _MOE_WINDOWS | dict(hidden_size_per_layer_input=0, attention_k_eq_v=True, enable_moe_block=True, top_k_experts=2, num_global_key_value_heads=1, global_head_dim=16)),
    "gemma4_unified_text": ("Gemma4UnifiedTextConfig", _GEMMA4),
    "git": ("GitConfig", _NO_HEAD_DIM | dict(vision_config=_VISION)),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _DEEPSEEK),
    "got_ocr2": ("GotOcr2Config", dict(text_config=_TINY, vision_config=_VISION | dict(output_channels=16, mlp_dim=16), tie_word_embeddings=False)),
    "gpt_neox_japanese": ("GPTNeoXJapaneseConfig", _NO_HEAD_DIM | dict(intermediate_multiple_size=2)),
    "granite_swa": ("GraniteSWAConfig", _WINDOWS),
    "granitemoe_swa": ("GraniteMoeSWAConfig", _EXPERTS | dict(sliding_window=WINDOW, layer_types=_MIXED)),
    "granitemoeshared": ("GraniteMoeSharedConfig", _EXPERTS | dict(shared_intermediate_size=32)),
    "hrm_text": ("HrmTextConfig", _TINY | dict(num_hidden_layers=1)),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", _TINY),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", _MOE | dict(moe_topk=2)),
    "hy_v3": ("HYV3Config", _MOE),
    "hyperclovax": ("HyperCLOVAXConfig", _TINY),
    "internlm3": ("InternLM3Config", _TINY),
    "iquestcoder": ("IQuestCoderConfig", _TINY),
    "jais2": ("Jais2Config", _TINY),
    "jetmoe": ("JetMoeConfig", _EXPERTS | dict(kv_channels=8)),
    "kolibri1": ("Kolibri1Config", _MOE_WINDOWS),
    "laguna": ("LagunaConfig", _MOE_WINDOWS),
    "llama4": ("Llama4Config", dict(text_config=ARCHITECTURES["llama4_text"][1], vision_config=_VISION | dict(projector_output_dim=16))),
    "longcat_flash": ("LongcatFlashConfig", _LATENT | dict(num_layers=2, ffn_hidden_size=64, moe_topk=2, n_routed_experts=4, zero_expert_num=2, expert_ffn_hidden_size=32)),
    "marian": ("MarianConfig", _BART | dict(decoder_vocab_size=VOCABULARY)),
    "mbart": ("MBartConfig", _BART),
    "megatron_bert": ("MegatronBertConfig", _BERT),
    "mellum": ("MellumConfig", _MOE_WINDOWS),
    "mimo_v2_flash": ("MiMoV2FlashConfig", _MOE_WINDOWS | dict(n_routed_experts=4, v_head_dim=8)),
    "minimax_m2": ("MiniMaxM2Config", _EXPERTS),
    "minimax_m3_vl_text": ("MiniMaxM3VLTextConfig", _EXPERTS | dict(dense_intermediate_size=64, shared_intermediate_size=32, layer_types=["full_attention"] * 2)),
    "ministral": ("MinistralConfig", _WINDOWS),
    "ministral3": ("Ministral3Config", _TINY | dict(sliding_window=WINDOW)),
    "mllama": ("MllamaConfig", dict(text_config=_NO_HEAD_DIM | dict(cross_attention_layers=[1]), vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_global_layers=1, attention_heads=2, intermediate_layers_indices=[0]))),
    "modernbert_decoder": ("ModernBertDecoderConfig", _WINDOWS | dict(local_attention=2 * WINDOW)),
    "moshi": ("MoshiConfig", _TINY | dict(ffn_dim=64, sliding_window=WINDOW)),
    "moss_transcribe_diarize": ("MossTranscribeDiarizeConfig", dict(text_config=_TINY, audio_config=dict(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16), tie_word_embeddings=False)),
    "mvp": ("MvpConfig", _BART),
    "nanochat": ("NanoChatConfig", _TINY),
    "olmoe": ("OlmoeConfig", _MOE),
    "pegasus": ("PegasusConfig", _BART),
    "phi4_multimodal": ("Phi4MultimodalConfig", _TINY | dict(sliding_window=WINDOW, original_max_position_embeddings=256, vision_config=_VISION | dict(crop_size=16, feature_layer=-1), audio_config=dict(hidden_size=16, intermediate_size=16, num_blocks=1, num_attention_heads=2, ext_pw_out_channel=16, nemo_conv_channels=16, depthwise_separable_out_channel=16))),
    "plbart": ("PLBartConfig", _BART),
    "prophetnet": ("ProphetNetConfig", {k: v for k, v in _TINY.items() if k != "num_hidden_layers"} | dict(num_encoder_layers=3, num_decoder_layers=3, num_decoder_attention_heads=4, decoder_ffn_dim=64, add_cross_attention=False, is_decoder=True, is_encoder_decoder=False)),
    "rembert": ("RemBertConfig", _BERT | dict(input_embedding_size=16, output_embedding_size=24)),
    "roberta": ("RobertaConfig", _BERT),
    "roberta_prelayernorm": ("RobertaPreLayerNormConfig", _BERT),
    "roc_bert": ("RoCBertConfig", _BERT | dict(pronunciation_embed_dim=8, pronunciation_vocab_size=VOCABULARY, shape_embed_dim=8, shape_vocab_size=VOCABULARY)),
    "roformer": ("RoFormerConfig", _BERT | dict(embedding_size=32)),
    "solar_open": ("SolarOpenConfig", _MOE | dict(n_routed_experts=4)),
    "trocr": ("TrOCRConfig", _BART),
    "vaultgemma": ("VaultGemmaConfig", _WINDOWS | dict(query_pre_attn_scalar=8)),
    "whisper": ("WhisperConfig", _BART | dict(max_target_positions=256, suppress_tokens=None, begin_suppress_tokens=None)),
    "xlm_roberta": ("XLMRobertaConfig", _BERT),
    "xlm_roberta_xl": ("XLMRobertaXLConfig", _BERT),
    "xmod": ("XmodConfig", _BERT | dict(default_language="en_XX")),
    "youtu": ("YoutuConfig", _LATENT),
}  # fmt: skip


_MAMBA = dict(
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_n_groups=1,
    mamba_d_state=8,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=8,
)
_LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "full_attention"],
)
_JAMBA = dict(
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=4,
    mamba_d_state=8,
    mamba_dt_rank=4,
)
_SPARSE = dict(mlp_layer_types=["dense", "sparse"])
_NEMOTRON = dict(ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=16, n_groups=1, chunk_size=8)
_ZAMBA = _NO_HEAD_DIM | dict(
    num_hidden_layers=4,  # its blocks are shared by layers
    num_key_value_heads=4,
    mamba_d_state=8,
    layers_block_type=["linear_attention", "hybrid"] * 2,
)
_INKLING = _TINY | dict(
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=8,
    sliding_window_size=WINDOW,
    d_rel=4,
    rel_extent=16,
    layer_types=["hybrid_sliding", "hybrid"],
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    unpadded_vocab_size=VOCABULARY,
)

# Layers that keep a state: alone, beside layers with attention, or in one layer with it.
STATE_ARCHITECTURES = {
    "mamba": ("MambaConfig", _TINY | dict(state_size=8, time_step_rank=4)),
    "mamba2": ("Mamba2Config", _TINY | dict(num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8)),
    "falcon_mamba": ("FalconMambaConfig", _TINY | dict(state_size=8, time_step_rank=4)),
    "jamba": ("JambaConfig", _TINY | _JAMBA),
    "bamba": ("BambaConfig", _TINY | _MAMBA | dict(attn_layer_indices=[1])),
    "falcon_h1": ("FalconH1Config", _TINY | _MAMBA | dict(mamba_d_ssm=64)),
    "zamba2": ("Zamba2Config", _ZAMBA | dict(n_mamba_heads=4, chunk_size=8, adapter_rank=4)),
    "lfm2": ("Lfm2Config", _TINY | dict(layer_types=["conv", "full_attention"], block_multiple_of=16)),
    "qwen3_next": ("Qwen3NextConfig", _MOE | _LINEAR),
    "granitemoehybrid": ("GraniteMoeHybridConfig", _EXPERTS | _MAMBA | dict(shared_intermediate_size=32, layer_types=["linear_attention", "full_attention"])),
    "nemotron_h": ("NemotronHConfig", {k: v for k, v in _TINY.items() if k != "num_hidden_layers"} | _NEMOTRON | dict(layers_block_type=["linear_attention", "full_attention", "linear_attention", "mlp"])),
}  # fmt: skip
RARE_STATE_ARCHITECTURES = {
    "bailing_hybrid": ("BailingHybridConfig", _DEEPSEEK | _SPARSE | dict(num_experts=4, num_experts_per_token=2, num_expert_group=1, linear_head_dim=8, linear_num_heads=4, q_lora_rank=None, layer_types=["linear_attention", "full_attention"], num_nextn_predict_layers=0)),
    "inkling": ("InklingTextConfig", _INKLING | _SPARSE),
    "inkling2": ("Inkling2TextConfig", _INKLING | dict(num_hidden_layers=4, layer_types=["hybrid_sliding", "hybrid"] * 2, n_layers_per_attn_res_block=2)),
    "kimi_linear": ("KimiLinearConfig", _LATENT | _SPARSE | dict(q_lora_rank=None, num_experts=4, num_experts_per_token=2, moe_intermediate_size=32, linear_head_dim=8, linear_num_heads=4, layer_types=["linear_attention", "full_attention"])),
    "lfm2_moe": ("Lfm2MoeConfig", _MOE | dict(layer_types=["conv", "full_attention"], num_dense_layers=1)),
    "lfm3": ("Lfm3Config", _TINY | dict(num_hidden_layers=4, sliding_window=WINDOW, layer_types=["conv", "full_attention", "conv", "sliding_attention"])),
    "nemotron_h_moe": ("NemotronHConfig", {k: v for k, v in _TINY.items() if k != "num_hidden_layers"} | dict(layers_block_type=["full_attention", "moe", "full_attention", "mlp"], n_routed_experts=4, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32)),
    "olmo_hybrid": ("OlmoHybridConfig", _TINY | _LINEAR | dict(linear_num_value_heads=2)),
    "qwen3_5_text": ("Qwen3_5TextConfig", _TINY | _LINEAR),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", _MOE | _LINEAR),
    "zamba": ("ZambaConfig", _ZAMBA | dict(attention_hidden_size=64, attention_head_dim=16, n_mamba_heads=2, mamba_dt_rank=4)),
    "zaya": ("ZayaConfig", _TINY | dict(num_experts=4, moe_intermediate_size=32, router_hidden_size=16, layer_types=["hybrid", "hybrid_sliding"], sliding_window=WINDOW)),
}  # fmt: skip
MORE_ARCHITECTURES |= STATE_ARCHITECTURES
RARE_ARCHITECTURES |= RARE_STATE_ARCHITECTURES


@cache
def suiting(name: str) -> list[str]:
    """The cache backends that are for this architecture."""
    config_class, arguments = (ARCHITECTURES | MORE_ARCHITECTURES | RARE_ARCHITECTURES)[name]
    if not hasattr(transformers, config_class):  # this release of transformers does not know it yet
        return ["none"]
    config = getattr(transformers, config_class)(**arguments)
    return [backend for backend in caches.names() if _suits(backend, config)]


def _suits(backend: str, config) -> bool:
    options = {"max_cache_len": 64} if caches.recipe(backend).has_a_size else {}
    try:
        caches.build(backend, config, **options)
    except caches.UnsupportedLayerError:
        return False
    return True


def pairs(names) -> list[tuple[str, str]]:
    """Every architecture with every backend that is for it."""
    return [(name, backend) for name in names for backend in suiting(name)]


def config_of(name: str) -> str:
    """The configuration class of the architecture."""
    return (ARCHITECTURES | MORE_ARCHITECTURES | RARE_ARCHITECTURES)[name][0]


@cache
def tiny_model(name: str) -> PreTrainedModel:
    """The architecture's model."""
    return randomised(*(ARCHITECTURES | MORE_ARCHITECTURES | RARE_ARCHITECTURES)[name])


@cache
def four_layers(name: str) -> PreTrainedModel:
    """The architecture's model with four layers, where one between others is to fail or to be left out."""
    config_class, arguments = (ARCHITECTURES | MORE_ARCHITECTURES)[name]
    if arguments["num_hidden_layers"] == 4:
        return tiny_model(name)
    twice = {key: arguments[key] * 2 for key in ("layer_types", "no_rope_layers") if key in arguments}
    if "attn_layer_indices" in arguments:
        twice["attn_layer_indices"] = [1, 3]
    return randomised(config_class, arguments | twice | {"num_hidden_layers": 4})


def randomised(config_class: str, arguments: dict) -> PreTrainedModel:
    """A model with this configuration, float32, seeded.

    transformers initialises with a deviation of 0.02, where attention hardly moves the logits and a wrong cache goes
    unnoticed; here every matrix has 0.3.
    """
    config = getattr(transformers, config_class)(**arguments)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.3)
    # Some classes put an end-of-sequence id back that their configuration was told to leave out.
    model.generation_config.eos_token_id = None
    model.generation_config.use_cache = True  # mpt says no
    model.generation_config.pad_token_id = 0
    return model


def prompt(rows: int = 2, tokens: int = 13, pads: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids, longer than the window; the first row begins with `pads` pads."""
    ids = torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    ids[mask == 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


def ids_of(tokens: int, seed: int = 0) -> torch.Tensor:
    """Of one prompt without pads, [1, tokens]."""
    return prompt(rows=1, tokens=tokens, pads=0, seed=seed)["input_ids"]
