"""Between two vocabularies, by way of the text. What a draft proposes is verified, so no translation is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from strategies import Translation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_CONTEXT = 10  # tokens before new ones that a tokenizer is shown with them


class Translator:
    """For one row. mask [1, prompt columns]; prefix_ids [1, n] come before. max_columns: of the draft's texts."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        draft_tokenizer: Any,
        mask: torch.Tensor,
        prefix_ids: torch.Tensor | None,
        max_columns: int,
    ):
        self._tokenizer, self._draft_tokenizer = tokenizer, draft_tokenizer
        self._prefix = [] if prefix_ids is None else prefix_ids[0].tolist()
        self._mask = mask[0].tolist()
        self.translation = Translation(self._to_draft, self._to_model, max_columns)

    def _to_draft(self, ids: torch.Tensor) -> torch.Tensor:
        draft = self._draft_tokenizer
        tokens = draft(_text(self._tokenizer, self._all(ids)))["input_ids"]
        if len(tokens) > 1 and tokens[-1] == draft.eos_token_id:  # the text goes on
            tokens = tokens[:-1]
        begin = next((token for token in (draft.bos_token_id, draft.eos_token_id) if token is not None), 0)
        return torch.tensor([tokens or [begin]], device=ids.device)

    def _to_model(self, ids: torch.Tensor, draft_ids: torch.Tensor, known_tokens: int) -> torch.Tensor:
        row = draft_ids[0].tolist()
        known_text, text = _text(self._draft_tokenizer, row[:known_tokens]), _text(self._draft_tokenizer, row)
        if not text.startswith(known_text):  # half a character has become a whole one
            return ids[:, :0]
        context = self._all(ids)[-_CONTEXT:]
        tokens = self._encode(_text(self._tokenizer, context) + text[len(known_text) :])
        # What is at the border may be written in another way beside its neighbours.
        is_prefix = tokens[: len(context)] == context
        tokens = tokens[len(context) :] if is_prefix else self._encode(text[len(known_text) :])
        return torch.tensor([tokens], dtype=torch.long, device=ids.device).view(1, -1)

    def _all(self, ids: torch.Tensor) -> list[int]:
        """The ids of the whole text, without padding."""
        all_ids = self._prefix + ids[0].tolist()
        mask = self._mask + [1] * (len(all_ids) - len(self._mask))
        return [token for token, real in zip(all_ids, mask, strict=True) if real]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
