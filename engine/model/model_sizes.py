"""How many tokens a model has scores and positions for."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def vocabulary_of(model: PreTrainedModel) -> int | None:
    """How many tokens the model has scores for; None where that is not known."""
    head = model.get_output_embeddings()
    return getattr(head, "out_features", None) or getattr(
        model.config.get_text_config(decoder=True), "vocab_size", None
    )


def most_positions(model: PreTrainedModel) -> int | None:
    """None: no limit, or one that rotations stretch with the text."""
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) or _in_table(model)
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    return None if positions <= 0 or rope_type == "dynamic" else positions


def _in_table(model: PreTrainedModel) -> int:
    """How many positions the decoder has learned embeddings for; 0 where it has none, or no such table."""
    table = getattr(model.get_decoder(), "embed_positions", None)
    return table.num_embeddings if isinstance(table, nn.Embedding) else 0
