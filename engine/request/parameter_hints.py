"""What an unknown parameter may have been meant to be: names of other engines, and misspelt ones."""

from __future__ import annotations

from configs import nearest

# What other engines call a parameter, and what to say here.
# fmt: off
ELSEWHERE = {
    **dict.fromkeys(("n", "samples", "num_samples"), "num_return_sequences"),
    "best_of": "num_beams, or num_return_sequences with do_sample=True",
    **dict.fromkeys(("stop", "stop_sequences", "stop_words", "stop_sequence"), "stop_strings"),
    **dict.fromkeys(("stop_token_ids", "end_id", "eos_id", "eos_token"), "eos_token_id"),
    "ignore_eos": "eos_token_id=None",
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_gen_len", "n_predict"), "max_new_tokens"),
    **dict.fromkeys(("num_predict", "max_output_tokens", "max_tokens_to_sample"), "max_new_tokens"),
    "min_tokens": "min_new_tokens",
    **dict.fromkeys(("prompt", "prompts", "text", "texts"), "inputs, the argument after the model"),
    **dict.fromkeys(("messages", "conversation"),
        "inputs, the argument after the model: a list like [{'role': 'user', 'content': ...}] (the `send` of a chat "
        "takes one message at a time)"),
    "logprobs": "top_logprobs",
    "prompt_logprobs": "not offered: top_logprobs has new tokens alone, but completions of `engine serve` take echo",
    **dict.fromkeys(("random_seed", "rng_seed", "manual_seed"), "seed"),
    "repeat_penalty": "repetition_penalty",
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), "a logits processor of yours, or repetition_penalty"),
    "compile": "EngineConfig(compile=...)",
    "skip_special_tokens": "always so for the text, and Generation.tokens has the ids",
    "logit_bias": "sequence_bias",
    "bad_words": "bad_words_ids",
    **dict.fromkeys(("beam_width", "beam_size", "n_beams", "use_beam_search"), "num_beams"),
    **dict.fromkeys(("draft_model", "speculative_model"), "assistant_model"),
    "num_speculative_tokens": "num_assistant_tokens",
    **dict.fromkeys(("max_seq_len", "max_model_len", "n_ctx", "num_ctx"), "cache_config={'max_cache_len': ...}"),
    **dict.fromkeys(("kv_cache_dtype", "kv_cache", "cache_type"), "cache, such as cache='quantized'"),
    **dict.fromkeys(("kv_bits", "nbits", "cache_bits"), "cache='quantized', cache_config={'nbits': 4}"),
    **dict.fromkeys(("kv_group_size", "q_group_size"), "cache='quantized', cache_config={'q_group_size': 64}"),
    **dict.fromkeys(("quantize", "quantized", "quantization", "quantization_config", "load_in_4bit", "load_in_8bit"),
        "cache='quantized' for keys and values, and EngineConfig(weights='int8') for weights on a CPU"),
    **dict.fromkeys(("max_kv_size", "window_length", "sliding_window"),
        "cache='sink', cache_config={'window_length': ...}"),
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
    **dict.fromkeys(("stream", "streaming"), "engine.stream(...) in place of generate, or streamer"),
    **dict.fromkeys(("dtype", "torch_dtype", "device", "device_map"), "EngineConfig, or load the model with it"),
    "custom_generate": "strategy, an object with a flow of its own",
}
# fmt: on


def hint(name: str, names: set[str]) -> str:
    """What may have been meant by an unknown parameter: two or three names, or where all of them are listed."""
    if name in ELSEWHERE:
        return f"here it is {ELSEWHERE[name]}"
    return nearest(name, sorted(parameter for parameter in names if not parameter.startswith("_")), most=0) or (
        "help(engine.generate) lists the parameters"
    )
