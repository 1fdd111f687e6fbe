"""The special tokens that an example is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from armature.components.contracts.errors import DataError
from armature.components.policies.molmoact2.configuration import MolmoAct2Config


@dataclass(frozen=True)
class ActionVocabulary:
    """Token ids. `state` and `action` are the first of their runs; BOS is the tokenizer's, or its EOS."""

    image_start: int
    image_end: int
    image_patch: int
    image_column: int
    state_start: int
    state_end: int
    state: int
    action_start: int
    action_end: int
    action: int
    bos: int
    eos: int
    pad: int

    @classmethod
    def find(cls, tokenizer: Any, config: MolmoAct2Config) -> ActionVocabulary:
        """
        Args:
            tokenizer: A transformers fast tokenizer.

        Raises:
            DataError: a token is missing, or the checkpoint's configuration gives it another id.
        """
        known: dict[str, int] = tokenizer.get_vocab()
        expected = {
            "<im_start>": config.image_start_token_id,
            "<im_end>": config.image_end_token_id,
            "<im_patch>": config.image_patch_id,
            "<im_col>": config.image_col_id,
            "<state_start>": config.state_start_token_id,
            "<state_end>": config.state_end_token_id,
            "<state_0>": config.state_token_start_id,
            "<action_start>": config.action_start_token_id,
            "<action_end>": config.action_end_token_id,
            "<action_0>": config.action_token_start_id,
        }
        runs = (("state", config.num_state_tokens), ("action", config.num_action_tokens))
        last = {
            f"<{kind}_{count - 1}>": None if first is None else first + count - 1
            for kind, count in runs
            for first in [known.get(f"<{kind}_0>")]
        }
        for token, wanted in (expected | last).items():
            if known.get(token) is None or wanted not in (None, known[token]):
                raise DataError(
                    f"token {token} is {known.get(token)} in the tokenizer and {wanted} by the configuration",
                    code="special_token_mismatch",
                    where="tokenizer.json and config.json",
                    remedy="use the tokenizer that the checkpoint was saved with",
                )
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        if eos is None or pad is None:
            raise DataError(
                f"the tokenizer has no {'end-of-text' if eos is None else 'padding'} token",
                code="special_token_missing",
                where="tokenizer_config.json",
                remedy="name eos_token and pad_token there, as the released checkpoint does",
            )
        bos = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        return cls(
            image_start=known["<im_start>"],
            image_end=known["<im_end>"],
            image_patch=known["<im_patch>"],
            image_column=known["<im_col>"],
            state_start=known["<state_start>"],
            state_end=known["<state_end>"],
            state=known["<state_0>"],
            action_start=known["<action_start>"],
            action_end=known["<action_end>"],
            action=known["<action_0>"],
            bos=bos,
            eos=eos,
            pad=pad,
        )
