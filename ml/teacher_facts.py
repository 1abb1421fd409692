"""What is known of a teacher before it is loaded, without torch, and how its head and states are stored.

A teacher's logits are scale x (hidden state . weight + bias). The loss knows only hidden state . head, in bf16, so
bias and scale are folded, both without a rounding:

    head [V, W]      scale x weight in columns 0 to E-1; with a bias, scale x bias as a sum of BIAS_COLUMNS columns
                     (its bf16 value, that of the rest, that of the rest's rest: fp32's 24 bits), then zeros
    states [T, W]    the hidden state in columns 0 to E-1; with a bias, BIAS_COLUMNS ones, then zeros

W is E without a bias, else the next multiple of FP8_ROWS with room for them.

Letters: V vocabulary rows, E width of the model, W stored width, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ml.model_files import FP8_ROWS
from schemas.work.model import HeadSource

BIAS_COLUMNS = 3


@dataclass(frozen=True)
class TeacherFacts:
    """head: where its matrix lies, and V and E. input_rows: token ids that it embeds, 0 to input_rows - 1.

    context_tokens: positions that it knows. The tokenizer lies in the same folder (tasks.inputs.text), and the model's
    digest is read from every byte of it, so neither is among these facts of headers and settings.
    """

    head: HeadSource
    input_rows: int
    context_tokens: int

    @property
    def stored_width(self) -> int:
        """W: columns of its hidden states in the store."""
        return stored_width(self.head.width, has_bias=self.head.bias is not None)


def stored_width(width: int, *, has_bias: bool) -> int:
    """W of a model of width E."""
    if not has_bias:
        return width
    return -(-(width + BIAS_COLUMNS) // FP8_ROWS) * FP8_ROWS


def is_power_of_two(scale: float) -> bool:
    """Is the product of a bf16 or fp32 number of ordinary size with `scale` exact? 2^-32 to 2^32 only."""
    return scale > 0 and math.frexp(scale)[0] == 0.5 and 2.0**-32 <= scale <= 2.0**32
