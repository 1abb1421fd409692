"""Linear products whose weight values, and on request whose bits per row, are the same in sampling and training.

Owns two promises. Values: rollout, teacher and training forward all take weights from `weight_values`, so they see
equal numbers whatever dtype or packing holds them. Rows: without gradients, a row of a product has the same bits
whatever else is in the batch (`kernels.scaled_mm`), on one kind of device and one build of torch. Training in FP8 keeps
the first: MXFP4 values go over into FP8 without loss, which is checked for every weight after every update.

Letters: N rows, I inputs, O outputs, D student width, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from kernels.quant import mxfp4_dequantize, mxfp4_quantize, mxfp4_round, mxfp4_to_fp8
from kernels.rows import silu_gate
from kernels.scaled_mm import (
    LARGEST_SCALE,
    Fp8Input,
    Fp8Weight,
    Mxfp4Weight,
    fp8_input,
    fp8_linear,
    fp8_weight,
    join_mxfp4,
    mxfp4_gate_mm,
    mxfp4_mm,
    pack_mxfp4,
    plain_mm,
    row_invariant_gate_mm,
    row_invariant_mm,
    row_invariant_mms,
    split_mxfp4,
)
from ml.device import traits
from ml.tensor_parallel import ALONE, Group

Precision = Literal["fp32", "bf16", "mxfp4"]
Compute = Literal["fp32", "bf16", "fp8"]

#: dtype of activations; of the linears' products too, except that training in FP8 multiplies FP8 codes.
COMPUTE_DTYPES: dict[Compute, torch.dtype] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16,
}  # fmt: skip


def weight_values(w: torch.Tensor, precision: Precision, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The numbers that a weight stands for on a value grid, in w's shape and in dtype, w's own unless given.

    "fp32": w itself. "bf16": each element rounded to the nearest bf16, ties to even. "mxfp4": w's MXFP4 code, for a
    matrix whose columns are a multiple of 32; quantise the fp32 master, since rounding to bf16 first can
    give other codes. The gradient of both passes straight through to w.
    """
    dtype = dtype or w.dtype
    if precision == "fp32" or (precision == "bf16" and w.dtype == torch.bfloat16):
        return w.to(dtype)
    if precision == "bf16":
        return _RoundToBf16.apply(w, dtype)
    if precision == "mxfp4":
        return _RoundToMxfp4.apply(w, dtype)
    raise ValueError(f"precision {precision!r}")


def fp8_values(w_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`weight_values` on the MXFP4 grid as FP8: (codes, scales, exact) of `kernels.quant.mxfp4_to_fp8`, no gradient.

    A tile that is not exact holds other values than the weight stands for.
    """
    return mxfp4_to_fp8(*mxfp4_quantize(w_OI.detach()))


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None


class _RoundToBf16(_StraightThrough):
    # A cast there and back would also round the gradient to bf16.
    @staticmethod
    def forward(w, dtype):
        return w.to(torch.bfloat16).to(dtype)


class _RoundToMxfp4(_StraightThrough):
    @staticmethod
    def forward(w, dtype):
        return mxfp4_round(w, dtype)


@dataclass(frozen=True)
class _Fp8Copy:
    """What is known of FP8 for a weight of this version (torch counts its writes): whether FP8 holds all of its values,
    and, where they are held, its codes."""

    version: int
    exact: bool
    held: Fp8Weight | None


class Linear(nn.Module):
    """y = x W^T + b, with W's values on the grid `precision` and the product in `compute`.

    weight [O, I] and bias [O] may be an fp32 master (training) or already hold values in `compute` (inference): the
    values are equal. A layer that `packs`, for inference alone, keeps MXFP4 codes instead, which `set_weight` makes:
    a quarter of the bytes, the same bits of y, and `weight` is a shape without storage. Not a subclass of nn.Linear,
    whose exact class DeepSpeed's autocast gathers in bf16. With gradients enabled the product is the library's plain
    one; without, it is row-invariant.

    fp8 (of an MXFP4 master in bf16 compute): with gradients enabled, forward and backward multiply in FP8 where FP8
    holds all of W's values, and in bf16 where it does not. `fp8_exact` says which; None: the next forward finds out.
    The answer is kept because reading it waits for the device, and so that a forward that is recomputed in backward
    goes the same way. `Fp8Weights` finds the answer again after an update, and may hold the FP8 codes too. An in-place
    write that torch counts makes both invalid. A write that torch does not count (to `.data`, or DeepSpeed's update)
    does not, so whoever makes one calls `Fp8Weights.renew` afterwards.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        bias: bool,
        precision: Precision,
        compute: torch.dtype,
        dtype: torch.dtype,
        packs: bool = False,
        fp8: bool = False,
        group: Group = ALONE,
        gathers: bool = False,
    ) -> None:
        super().__init__()
        self.precision: Precision = precision
        self.compute = compute
        self.packs = packs
        self.fp8 = fp8
        self._fp8_copy: _Fp8Copy | None = None
        self.group, self.gathers = group, gathers
        self.num_inputs, self.num_outputs = num_inputs, num_outputs
        self.packed: Mxfp4Weight | None = None
        self._device = torch.get_default_device()
        self.weight = nn.Parameter(
            torch.empty(group.share(num_outputs), num_inputs, dtype=dtype, device="meta" if packs else self._device)
        )
        self.bias = nn.Parameter(torch.empty(group.share(num_outputs), dtype=dtype)) if bias else None

    @torch.no_grad()
    def set_weight(self, w_OI: torch.Tensor) -> None:
        """Take the weight's values, a rank's own rows, of any float dtype and device. A packing layer quantises them.

        Values beyond 12 do not fit a packed weight (`pack_mxfp4`): such a layer keeps its MXFP4 values in `compute`.
        """
        if not self.packs:
            self.weight.copy_(w_OI)
            return
        blocks, scales = mxfp4_quantize(w_OI.to(self._device))
        if int(scales.max()) <= LARGEST_SCALE:
            self.packed = pack_mxfp4(blocks, scales)
            self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)
        else:
            self.packed = None
            self.weight = nn.Parameter(mxfp4_dequantize(blocks, scales, self.compute), requires_grad=False)

    def shared_input(self, x_NI: torch.Tensor) -> Fp8Input | None:
        """For `forward` of this linear and of others of its kind that read the same x: what they would each make."""
        return fp8_input(x_NI.to(self.compute)) if self.fp8 and torch.is_grad_enabled() else None

    def forward(self, x_NI: torch.Tensor, x_fp8: Fp8Input | None = None) -> torch.Tensor:
        """[N, I] of any float dtype -> [N, O] in `compute`; of both, a rank's own columns where the class says so.

        x_fp8: `shared_input` of x_NI, if several linears read it.
        """
        x_NI = x_NI.to(self.compute)
        if not self.gathers:
            return self._product(x_NI, x_fp8)
        return self.group.gather(self._product(self.group.gather(x_NI, self.num_inputs)), self.num_outputs)

    def _product(self, x_NI: torch.Tensor, x_fp8: Fp8Input | None = None) -> torch.Tensor:
        bias_O = None
        if self.bias is not None:
            bias_O = weight_values(self.bias, dense_precision(self.precision), self.compute)
        if self.packed is not None:
            out_NO = mxfp4_mm(x_NI, self.packed)
            return out_NO if bias_O is None else out_NO.add_(bias_O)
        w_fp8 = self._fp8_weight() if self.fp8 and torch.is_grad_enabled() else None
        if w_fp8 is not None:
            out_NO = fp8_linear(x_NI, self.weight, w_fp8, x_fp8)
        else:
            w_OI = weight_values(self.weight, self.precision, self.compute)
            if not torch.is_grad_enabled():
                return row_invariant_mm(x_NI, w_OI, bias_O)
            out_NO = plain_mm(x_NI, w_OI)
        return out_NO if bias_O is None else out_NO + bias_O

    @property
    def fp8_exact(self) -> bool | None:
        """Whether FP8 holds all of the weight's values; None: not known."""
        copy = self._known_copy()
        return copy and copy.exact

    def _known_copy(self) -> _Fp8Copy | None:
        copy = self._fp8_copy
        return copy if copy is not None and copy.version == self.weight._version else None

    def _fp8_weight(self) -> Fp8Weight | None:
        """The weight in FP8, None where FP8 does not hold its values."""
        copy = self._known_copy()
        if copy is not None and (copy.held is not None or not copy.exact):
            return copy.held
        codes, scales, exact = fp8_values(self.weight)
        if copy is None:
            copy = self._fp8_copy = _Fp8Copy(self.weight._version, bool(exact.all()), None)
        return fp8_weight(codes, scales, transposed=False) if copy.exact else None


class Fp8Weights:
    """Which linears' weights FP8 holds, and their FP8 codes; `renew` computes both after every change of the weights.

    whole: whether the weights exist between passes, as they do except under ZeRO-3. Then the codes of each weight and
    of its transpose are held until the next `renew`, two bytes an element, so that forward, recomputation and backward
    need not make them. Where weights exist only while their module runs, nothing is held: the next forward checks the
    weight, and waits for the device.
    """

    def __init__(self, linears: Sequence[Linear], *, whole: bool) -> None:
        self._linears = [linear for linear in linears if linear.fp8]
        self._whole = whole
        self._graph: torch.cuda.CUDAGraph | None = None
        self._places: list[int] = []
        self._held: list[Fp8Weight] = []
        self._exact = torch.empty(0)

    def renew(self) -> None:
        """Look at all weights, with one wait for the device."""
        for linear in self._linears:
            linear._fp8_copy = None
        if not (self._linears and self._whole):
            return
        self._make()
        for linear, weight, exact in zip(self._linears, self._held, self._exact.tolist(), strict=True):
            linear._fp8_copy = _Fp8Copy(linear.weight._version, exact, weight if exact else None)

    def _make(self) -> None:
        weights = [linear.weight for linear in self._linears]
        if not traits(weights[0].device).graphs:
            self._held, self._exact = _held(weights)
            return
        # Three small launches a linear take the host longer than the device, which has nothing else to do meanwhile.
        places = [weight.data_ptr() for weight in weights]
        if places != self._places:
            self._held, self._exact = _held(weights)  # compiles, which no graph can
            self._graph = torch.cuda.CUDAGraph()
            # Other threads, NCCL's among them, may go on calling the device.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._held, self._exact = _held(weights)
            self._places = places
        assert self._graph is not None
        self._graph.replay()


def _held(weights: Sequence[torch.Tensor]) -> tuple[list[Fp8Weight], torch.Tensor]:
    """Each weight in FP8, and a vector of whether it holds all values."""
    held, exact = [], []
    for weight in weights:
        codes, scales, exact_tiles = fp8_values(weight)
        held.append(fp8_weight(codes, scales, transposed=True))
        exact.append(exact_tiles.all())
    return held, torch.stack(exact)


def _with_biases(columns_NO: Sequence[torch.Tensor], linears: Sequence[Linear]) -> list[torch.Tensor]:
    return [y if m.bias is None else y.add_(m.bias) for y, m in zip(columns_NO, linears, strict=True)]


class JoinedLinears:
    """Linears of one input, for inference, as one product where the device gains by it; the bits of each alone.

    Their weights become views of one matrix, so that names and shapes of parameters stay. gates: whether `gated` asks
    for a way that `self_test` chooses.
    """

    gates = True

    @torch.no_grad()
    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        self.sizes = [len(linear.weight) for linear in linears]
        self.shape = sum(self.sizes), linears[0].num_inputs
        self.weight = linears[0].weight.new_empty(self.shape)
        for linear, part_OI in zip(linears, self.weight.split(self.sizes), strict=True):
            linear.weight = nn.Parameter(part_OI.copy_(linear.weight), requires_grad=False)

    def __call__(self, x_NI: torch.Tensor) -> list[torch.Tensor]:
        """Each linear's [N, O], perhaps columns of one matrix."""
        return _with_biases(row_invariant_mms(x_NI.to(self.weight.dtype), self.weight, self.sizes), self.linears)

    def gated(self, x_NI: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [N, O], of two linears of one size."""
        if any(linear.bias is not None for linear in self.linears):
            return silu_gate(*self(x_NI))
        return row_invariant_gate_mm(x_NI.to(self.weight.dtype), self.weight)


class JoinedPacked:
    """`JoinedLinears` of linears that pack; their codes become views of one weight's."""

    gates = False

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        self.sizes = [len(linear.weight) for linear in linears]
        self.shape = sum(self.sizes), linears[0].num_inputs
        self._parts: tuple[Mxfp4Weight | None, ...] = (None,) * len(linears)
        self._whole: Mxfp4Weight | None = None

    def __call__(self, x_NI: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each linear's [N, O], columns of one matrix where one product can make them."""
        self._follow()
        if self._whole is None:
            return [linear(x_NI) for linear in self.linears]
        whole_NO = mxfp4_mm(x_NI.to(self.linears[0].compute), self._whole)
        return _with_biases(whole_NO.split(self.sizes, 1), self.linears)

    def gated(self, x_NI: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [N, O], of two linears of one size: one product where it can be."""
        self._follow()
        if self._whole is None or any(linear.bias is not None for linear in self.linears):
            return silu_gate(*self(x_NI))
        return mxfp4_gate_mm(x_NI.to(self.linears[0].compute), self._whole)

    def _follow(self) -> None:
        if any(linear.packed is not part for linear, part in zip(self.linears, self._parts, strict=True)):
            self._join([linear.packed for linear in self.linears])

    def _join(self, weights: list[Mxfp4Weight | None]) -> None:
        # Weights come one by one, after the model is made, and some may not fit a packed weight.
        packed = [weight for weight in weights if weight is not None]
        self._whole = join_mxfp4(packed) if len(packed) == len(weights) else None
        parts = packed if self._whole is None else split_mxfp4(self._whole, packed)
        if len(parts) == len(weights):
            for linear, part in zip(self.linears, parts, strict=True):
                linear.packed = part
        self._parts = tuple(linear.packed for linear in self.linears)


Joined = JoinedLinears | JoinedPacked


def apart(linears: Sequence[Linear], x_NI: torch.Tensor) -> list[torch.Tensor]:
    """Each linear's [N, O] of one input, which they share in FP8."""
    x_fp8 = linears[0].shared_input(x_NI)
    return [linear(x_NI, x_fp8) for linear in linears]


def join(linears: Sequence[Linear]) -> Joined:
    """Linears of one input, all of one kind, for inference."""
    return JoinedPacked(linears) if linears[0].packs else JoinedLinears(linears)


def dense_precision(precision: Precision) -> Precision:
    """Grid of what is never quantised (embedding, head, norms, biases) in a model of this precision."""
    return "fp32" if precision == "fp32" else "bf16"
