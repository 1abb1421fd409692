"""A teacher's head as the loss meets it, with bias and scale folded in; ml.teacher_facts has the layout.

Letters: V vocabulary rows, E width of the model, W stored width, T tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ml.checkpoint import check_tensor, read_tensor
from ml.model_files import check_digest
from ml.teacher_facts import BIAS_COLUMNS, is_power_of_two, stored_width
from schemas.errors import ConfigError
from schemas.keys import digest
from schemas.work.model import HeadSource


def read_teacher_head(source: HeadSource) -> torch.Tensor:
    """bf16 [V, W]. Raises ContractError for another head than the digest's, else as `read_head_parts`."""
    weight_VE, bias_V = read_head_parts(source)
    return fold_head(weight_VE, bias_V, source.scale)


def read_head_parts(source: HeadSource) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight [V, E], bias [V] or None) in their stored dtypes, unscaled.

    Raises ContractError for another digest, ConfigError and FormatError as `ml.checkpoint.read_tensor` and
    `check_tensor` do.
    """
    folder, hashed = Path(source.folder), source.digest is not None
    weight_VE, where, found = read_tensor(folder, source.weight, hashed=hashed)
    bias_V, where_bias = None, ""
    if source.bias is not None:
        bias_V, where_bias, second = read_tensor(folder, source.bias, hashed=hashed)
        found = digest([found, second])
    if source.digest is not None:
        check_digest(folder, source.digest, found, "head")
    check_tensor(weight_VE, (source.rows, source.width), where)
    if bias_V is not None:
        check_tensor(bias_V, (source.rows,), where_bias)
    return weight_VE, bias_V


def fold_head(weight_VE: torch.Tensor, bias_V: torch.Tensor | None, scale: float = 1.0) -> torch.Tensor:
    """bf16 [V, W] of float weight and bias: the weight's bf16 values, times scale; the bias to fp32's 24 bits.

    Raises ConfigError for a scale that is no power of two: its product with a bf16 weight would be rounded.
    """
    if not is_power_of_two(scale):
        raise ConfigError("a head's scale", expected="a power of two from 2^-32 to 2^32", found=repr(scale))
    rows, width = weight_VE.shape
    scaled_VE = weight_VE.to(torch.bfloat16)
    if scale != 1:
        scaled_VE = scaled_VE * scale
    if bias_V is None:
        return scaled_VE
    head_VW = scaled_VE.new_zeros(rows, stored_width(width, has_bias=True))
    head_VW[:, :width] = scaled_VE
    rest_V = bias_V.float() * scale
    for column in range(width, width + BIAS_COLUMNS):
        head_VW[:, column] = rest_V.to(torch.bfloat16)
        rest_V = rest_V - head_VW[:, column].float()
    return head_VW


def fold_states(hidden_TE: torch.Tensor, *, has_bias: bool) -> torch.Tensor:
    """The states [T, W] that meet a folded head, in the dtype of hidden_TE."""
    if not has_bias:
        return hidden_TE
    tokens, width = hidden_TE.shape
    stored_TW = hidden_TE.new_zeros(tokens, stored_width(width, has_bias=True))
    stored_TW[:, :width] = hidden_TE
    stored_TW[:, width : width + BIAS_COLUMNS] = 1
    return stored_TW
