"""A model that a rank loads."""

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
