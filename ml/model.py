"""The one transformer: Llama, Qwen2 and Qwen3 (dense), for student, teachers and rollout.

Parameters carry Hugging Face names, so state dicts map one to one. The caller gives the attention strategy: packed
sequences in training and teaching (`PackedCausal`), a paged cache in rollout. Residual stream and products are in
`compute`; norms, rotary angles and activations are computed in fp32 and rounded once. Without gradients, everything
but the strategy gives a row the same bits whatever else is in the batch.

Letters: N packed tokens, D student width, I feed-forward width, V vocabulary rows, H heads, G kv heads, C head
channels, M positions, S sequences, T tokens of one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels.packed_attention import packed_attention
from kernels.paged_attention import paged_attention
from kernels.rows import HeadNorms, Rotary, add_rms_norm, rms_norm, rotate, rotate_into_pages, silu_gate
from kernels.scaled_mm import row_invariant_mm, self_test
from ml.device import traits
from ml.linear import Joined, Linear, Precision, apart, dense_precision, join, weight_values
from ml.model_config import ModelConfig, Rope
from ml.tensor_parallel import ALONE, Group
from schemas.errors import ContractError

#: How a layer turns queries and keys before it compares them (kernels.rows.rotate): the rows' angles, and the norms.
Rotation = tuple[Rotary, HeadNorms | None]
#: attend(layer_index, q_NHC, k_NGC, v_NGC, rotation) -> o_NHC; all in the model's compute dtype. q and k are not turned
#: yet, so that a strategy with a cache can put keys there as it turns them.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Rotation], torch.Tensor]

#: Where the sampler cuts a sequence's keys: absolute positions, since the cuts decide the bits.
SPLIT_TOKENS = 64


class RmsNorm(nn.Module):
    """x / rms(x) * weight over each row, in fp32, rounded once to x's dtype (kernels.rows)."""

    def __init__(self, width: int, epsilon: float, precision: Precision) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.precision: Precision = dense_precision(precision)
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, h_ND: torch.Tensor, delta_ND: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(h + delta, its norm); without delta, (h, its norm)."""
        weight_D = weight_values(self.weight, self.precision)
        if delta_ND is None:
            return h_ND, rms_norm(h_ND, weight_D, self.epsilon)
        return add_rms_norm(h_ND, delta_ND, weight_D, self.epsilon)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, linears: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.heads * config.head_channels, config.kv_heads * config.head_channels
        self.q_proj = Linear(config.width, queries, bias=config.qkv_bias, **linears)
        self.k_proj = Linear(config.width, keys, bias=config.qkv_bias, **linears)
        self.v_proj = Linear(config.width, keys, bias=config.qkv_bias, **linears)
        self.o_proj = Linear(queries, config.width, bias=config.output_bias, gathers=True, **linears)
        self.joined: Joined | None = None
        if config.qk_norm:
            self.q_norm = RmsNorm(config.head_channels, config.norm_epsilon, linears["precision"])
            self.k_norm = RmsNorm(config.head_channels, config.norm_epsilon, linears["precision"])

    def join(self) -> None:
        """For inference: one product for queries, keys and values."""
        self.joined = join((self.q_proj, self.k_proj, self.v_proj))

    def forward(self, x_ND: torch.Tensor, rotary: Rotary, attend: Attend, layer_index: int) -> torch.Tensor:
        columns = self.joined(x_ND) if self.joined else apart((self.q_proj, self.k_proj, self.v_proj), x_ND)
        q_NHC, k_NGC, v_NGC = (y.unflatten(-1, (-1, self.config.head_channels)) for y in columns)
        norms = None
        if self.config.qk_norm and self.q_norm.weight.requires_grad:
            # In training a weight may be there only while its own module runs (ZeRO-3).
            q_NHC = self.q_norm(q_NHC.flatten(0, 1))[1].view_as(q_NHC)
            k_NGC = self.k_norm(k_NGC.flatten(0, 1))[1].view_as(k_NGC)
        elif self.config.qk_norm:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.config.norm_epsilon)
        return self.o_proj(attend(layer_index, q_NHC, k_NGC, v_NGC, (rotary, norms)).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, linears: dict[str, Any]) -> None:
        super().__init__()
        linears = {**linears, "bias": config.feed_forward_bias}
        self.gate_proj = Linear(config.width, config.feed_forward, **linears)
        self.up_proj = Linear(config.width, config.feed_forward, **linears)
        self.down_proj = Linear(config.feed_forward, config.width, gathers=True, **linears)
        self.joined: Joined | None = None

    def join(self) -> None:
        """For inference: one product for gate and up."""
        self.joined = join((self.gate_proj, self.up_proj))

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        if self.joined:
            return self.down_proj(self.joined.gated(x_ND))
        return self.down_proj(silu_gate(*apart((self.gate_proj, self.up_proj), x_ND)))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, linears: dict[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.width, config.norm_epsilon, linears["precision"])
        self.self_attn = Attention(config, linears)
        self.post_attention_layernorm = RmsNorm(config.width, config.norm_epsilon, linears["precision"])
        self.mlp = FeedForward(config, linears)

    def forward(
        self, h_ND: torch.Tensor, delta_ND: torch.Tensor | None, rotary: Rotary, attend: Attend, layer_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and what is still to be added to it: the next norm adds in the same pass."""
        h_ND, x_ND = self.input_layernorm(h_ND, delta_ND)
        h_ND, x_ND = self.post_attention_layernorm(h_ND, self.self_attn(x_ND, rotary, attend, layer_index))
        return h_ND, self.mlp(x_ND)


class Embedding(nn.Module):
    """Rows of weight [V, D] on the dense grid."""

    def __init__(self, num_rows: int, width: int, precision: Precision, dtype: torch.dtype) -> None:
        super().__init__()
        self.precision: Precision = dense_precision(precision)
        self.weight = nn.Parameter(torch.empty(num_rows, width, dtype=dtype))

    def forward(self, ids_N: torch.Tensor) -> torch.Tensor:
        if self.weight.is_cuda and not torch.is_grad_enabled():
            # F.embedding takes up to 16 rows one after the other there.
            return weight_values(self.weight[ids_N], self.precision)
        return weight_values(F.embedding(ids_N, self.weight), self.precision)


class Decoder(nn.Module):
    """What Hugging Face keeps under "model.": embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, linears: dict[str, Any], vocab_dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_rows, config.width, linears["precision"], vocab_dtype)
        self.layers = nn.ModuleList(Layer(config, linears) for _ in range(config.layers))
        self.norm = RmsNorm(config.width, config.norm_epsilon, linears["precision"])


class Head(nn.Module):
    """Holder of an untied unembedding matrix, weight [V, D]."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width, dtype=dtype))


class Transformer(nn.Module):
    """precision: grid of the linear weights' values; compute: dtype of activations and products.

    trainable: parameters are an fp32 master, from which each forward takes its values. Otherwise they hold those
    values and need no gradient: linears in `compute` (or as MXFP4 codes, where the device multiplies these), norms
    in fp32, embedding and head in what `logits` reads fastest. fp8: of a trainable MXFP4 model in bf16, the linears
    multiply in FP8 where they have gradients (`ml.linear`). Parameters are left uninitialised. checkpoint_layers
    (attribute): in training, keep only each layer's input and recompute the rest in backward. group: for inference,
    the ranks that compute together and all get the results; attention then sees a rank's heads. ConfigError where they
    cannot share the heads, or a layer's width, equally.
    """

    cos_MC: torch.Tensor
    sin_MC: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        precision: Precision,
        compute: torch.dtype,
        trainable: bool,
        fp8: bool = False,
        device: torch.device | str = "cpu",
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        group.check(
            f"a {config.architecture} model", KV_heads=config.kv_heads, hidden_channels=config.width,
            feed_forward_channels=config.feed_forward,
        )  # fmt: skip
        self.config, self.compute, self.trainable, self.group = config, compute, trainable, group
        self.precision: Precision = precision
        self.fp8 = fp8
        self.checkpoint_layers = False
        # Parameters that hold values already are taken as they are.
        grid: Precision = precision if trainable else "fp32"
        linears = {
            "precision": grid, "compute": compute, "dtype": torch.float32 if trainable else compute,
            "packs": precision == "mxfp4" and not trainable and traits(device).packs_mxfp4,
            "fp8": fp8, "group": group,
        }  # fmt: skip
        vocab_dtype = torch.float32 if trainable else traits(device).head_dtype or compute
        with torch.device(device):
            self.model = Decoder(config, linears, vocab_dtype)
            if not config.tied:
                self.lm_head = Head(config.vocab_rows, config.width, vocab_dtype)
        cos_MC, sin_MC = _rope_tables(config)
        self.register_buffer("cos_MC", cos_MC.to(device), persistent=False)
        self.register_buffer("sin_MC", sin_MC.to(device), persistent=False)
        self.requires_grad_(trainable)
        if not trainable:
            for module in self.modules():
                if isinstance(module, Attention | FeedForward):
                    module.join()

    @property
    def head_weight(self) -> nn.Parameter:
        """[V, D]: the embedding's own parameter when tied."""
        return self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight

    def forward(self, ids_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend) -> torch.Tensor:
        """States after the final norm, [N, D] in compute. ids and positions: integers, position 0 starts a sequence.

        Raises IndexError for an id or position out of range (on the CPU).
        """
        h_ND, delta_ND = self.model.embed_tokens(ids_N).to(self.compute), None
        rotary = Rotary(self.cos_MC, self.sin_MC, positions_N)
        for index, layer in enumerate(self.model.layers):
            if self.checkpoint_layers and torch.is_grad_enabled():
                # Added up here, so that one tensor a layer is kept.
                h_ND = h_ND if delta_ND is None else h_ND + delta_ND
                state = checkpoint(layer, h_ND, None, rotary, attend, index, use_reentrant=False)
                h_ND, delta_ND = state  # pyright: ignore[reportGeneralTypeIssues]
            else:
                h_ND, delta_ND = layer(h_ND, delta_ND, rotary, attend, index)
        return self.model.norm(h_ND, delta_ND)[1]

    @torch.no_grad()
    def logits(self, h_ND: torch.Tensor, vocab_size: int | None = None) -> torch.Tensor:
        """fp32 logits [N, vocab_size] of final states (default: every row of the head), row-invariant, no gradient."""
        w_VD = self.group.part(self.head_weight)
        if self.trainable:
            w_VD = weight_values(w_VD, dense_precision(self.precision))
        # Of every row: heads are padded to shapes that a product is fast and row-invariant for, tokenizers are not.
        logits_NV = self.group.gather(row_invariant_mm(h_ND, w_VD, dtype=torch.float32), self.config.vocab_rows)
        return logits_NV[:, :vocab_size]

    def check_row_invariance(self) -> None:
        """Raise ContractError unless products of this model's shapes keep a row's bits in any company on its device."""
        shapes = {(m.weight.shape[0], m.weight.shape[1]) for m in self.modules() if isinstance(m, Linear)}
        # Of packed weights too, whose decoded copy serves many rows.
        shapes |= {m.joined.shape for m in self.modules() if isinstance(m, Attention | FeedForward) and m.joined}
        gates = {m.joined.shape for m in self.modules() if isinstance(m, FeedForward) and m.joined and m.joined.gates}
        device = self.head_weight.device
        self_test(shapes, gates=gates, device=device)
        self_test([(self.group.share(self.config.vocab_rows), self.config.width)], dtype=torch.float32, device=device)


def inverse_frequencies(rope: Rope, num_channels: int) -> torch.Tensor:
    """fp32 [C/2], radians a position."""
    exponents = torch.arange(0, num_channels, 2, dtype=torch.int64).float() / num_channels
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "yarn":
        # As llama3's, but blended linearly over the channels between two numbers of turns in the original context.
        first, last = (
            num_channels * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
            for turns in (rope.beta_fast, rope.beta_slow)
        )
        if rope.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, num_channels - 1)
        last += 0.001 * (first == last)
        slowed = ((torch.arange(num_channels // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
        return plain * (1 - slowed) + plain / rope.factor * slowed
    if rope.kind != "llama3":
        return plain
    # Long waves are slowed by `factor`, short ones kept, those between blended by how often they turn around
    # within the original context.
    turns = rope.original_max_positions * plain / (2 * math.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return plain * share + plain / rope.factor * (1 - share)


def _rope_tables(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    # The whole table at once and always on the CPU, so that an entry depends on the config alone.
    positions_M = torch.arange(config.max_positions, dtype=torch.float32)
    angles_MC = positions_M[:, None] * inverse_frequencies(config.rope, config.head_channels)
    return angles_MC.cos() * config.rope.amplitude, angles_MC.sin() * config.rope.amplitude


class PackedCausal:
    """Attention strategy for packed whole sequences: causal inside each, nothing across, differentiable.

    cu_tokens: S+1 ascending token offsets, from 0 to N. No [N, N] mask exists.
    """

    def __init__(self, cu_tokens: list[int]) -> None:
        if len(cu_tokens) < 2 or cu_tokens[0] != 0 or any(b <= a for a, b in pairwise(cu_tokens)):
            raise ContractError("cu_tokens", expected="ascending offsets from 0", found=str(cu_tokens)[:200])
        self.cu_tokens = cu_tokens

    def __call__(self, layer_index: int, q_NHC, k_NGC, v_NGC, rotation: Rotation) -> torch.Tensor:
        return packed_attention(*rotate(q_NHC, k_NGC, *rotation), v_NGC, self.cu_tokens)


class SampledCausal:
    """The sampler's own attention over packed whole sequences: paged, cut at the same positions, so the same bits.

    cu_tokens: as in PackedCausal. page_tokens: of the sampler's pages. No gradient. Each call builds the layer's
    pages and drops them again.
    """

    def __init__(self, cu_tokens: list[int], *, page_tokens: int = 64) -> None:
        lengths = [end - first for first, end in pairwise(cu_tokens)]
        counts = [-(-length // page_tokens) for length in lengths]
        firsts = [0, *accumulate(counts)]
        table_SP = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for sequence, (first, count) in enumerate(zip(firsts[:-1], counts, strict=True)):
            table_SP[sequence, :count] = torch.arange(first, first + count, dtype=torch.int32)
        self.page_tokens, self.num_pages = page_tokens, firsts[-1]
        self.slots_N = torch.cat([torch.arange(n) + f * page_tokens for f, n in zip(firsts[:-1], lengths, strict=True)])
        self.where = table_SP, torch.tensor(cu_tokens, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)

    def __call__(self, layer_index: int, q_NHC, k_NGC, v_NGC, rotation: Rotation) -> torch.Tensor:
        device = q_NHC.device
        # Zeroed: a page's unused end must be finite.
        k_PTGC, v_PTGC = (x.new_zeros(self.num_pages, self.page_tokens, *x.shape[1:]) for x in (k_NGC, v_NGC))
        self.slots_N, self.where = self.slots_N.to(device), tuple(x.to(device) for x in self.where)
        q_NHC = rotate_into_pages(q_NHC, k_NGC, v_NGC, *rotation, k_PTGC, v_PTGC, self.slots_N)
        return paged_attention(q_NHC, k_PTGC, v_PTGC, *self.where, split_tokens=traits(device).split_tokens)
