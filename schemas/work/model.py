"""A model that a rank loads, and the head alone of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Which numbers the linears' weights stand for. Precisions of the KL's products are `kernels.linear_kl`'s.
WeightPrecision = Literal["fp32", "bf16", "mxfp4"]
Compute = Literal["fp32", "bf16", "fp8"]


@dataclass(frozen=True)
class ModelSource:
    """folder: on this node, in Hugging Face's layout. digest: of the model (`ml.model_files`), which loading checks.

    precision: of the linears' weights; compute: dtype of their products.
    """

    folder: str
    digest: str
    precision: WeightPrecision
    compute: Compute


@dataclass(frozen=True)
class HeadSource:
    """Where an unembedding matrix lies, by names of tensors: no architecture is asked for.

    folder: on this node, safetensors. weight: name of the tensor [rows, width]; bias: of [rows], or None. scale:
    factor of the logits, a power of two. digest: of the bytes of both (`ml.teacher_head`), which reading checks; None
    takes any.
    """

    folder: str
    weight: str
    rows: int
    width: int
    bias: str | None = None
    scale: float = 1.0
    digest: str | None = None
