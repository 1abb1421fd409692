"""Figures of attention: decode over pages against copy bandwidth, prefill against torch's flash, packed training.

FLOPs are 4 N^2 H C / 2 for a causal forward pass and 2.5 times that for the backward one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.packed_attention import packed_attention
from kernels.paged_attention import paged_attention
from kernels.testing import check, copy_gb_per_s, environment, figure, graph_us, median_ms, relative_error

#: What rollout takes on a GPU.
PAGE_TOKENS = 64
SPLIT_TOKENS = 512


def _bf16(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def _pages(sequences: int, tokens: int, kv_heads: int, channels: int) -> tuple[torch.Tensor, ...]:
    """Caches of keys and values, and a page table in random order."""
    pages = sequences * tokens // PAGE_TOKENS
    table_SP = torch.randperm(pages, device="cuda").int().view(sequences, -1)
    return *(_bf16(pages, PAGE_TOKENS, kv_heads, channels) for _ in range(2)), table_SP


def _counts(sequences: int, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    cu_rows_S1 = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * rows
    return cu_rows_S1, torch.full((sequences,), tokens, device="cuda", dtype=torch.int32)


def decode(figures: dict, channels: int, copy: float, target: str) -> None:
    """64 sequences of 8192 tokens, 32 heads over 8 KV heads, replayed from a graph as a decode step is."""
    k, v, table_SP = _pages(64, 8192, 8, channels)
    q_NHC = _bf16(64, 32, channels)
    rest = table_SP, *_counts(64, 1, 8192)
    microseconds = graph_us([lambda: paged_attention(q_NHC, k, v, *rest, split_tokens=SPLIT_TOKENS)])
    rate = 2 * 2 * 64 * 8192 * 8 * channels / microseconds / 1e3
    figures[f"decode_c{channels}"] = figure(rate / copy, "x copy", target)
    figures[f"decode_c{channels}_gb_s"] = figure(rate, "GB/s", "")


def prefill(figures: dict, peers: dict, heads: int, kv_heads: int, channels: int, target: str) -> None:
    """One chunk of 16,384 tokens, all of it new."""
    tokens = 16384
    k, v, table_SP = _pages(1, tokens, kv_heads, channels)
    q_NHC = _bf16(tokens, heads, channels)
    arguments = (q_NHC, k, v, table_SP, *_counts(1, tokens, tokens))
    ours_NHC = paged_attention(*arguments, split_tokens=SPLIT_TOKENS)
    dense = [cache[table_SP[0].long()].flatten(0, 1).repeat_interleave(heads // kv_heads, 1) for cache in (k, v)]
    q, k_all, v_all = (x.transpose(0, 1)[None].contiguous() for x in (q_NHC, *dense))
    expected = torch.softmax((q[0, :, -1:].double() @ k_all[0].double().mT) * channels**-0.5, -1) @ v_all[0].double()
    check(relative_error(ours_NHC[-1], expected[:, 0]) < 5e-3, f"prefill at {channels} channels")
    alone = paged_attention(q_NHC[-1:], k, v, table_SP, *_counts(1, 1, tokens), split_tokens=SPLIT_TOKENS)
    check(torch.equal(alone[0], ours_NHC[-1]), "a decode step differs from the row of its chunk")
    tflop = 2 * tokens**2 * heads * channels / 1e9
    ours = median_ms(lambda: paged_attention(*arguments, split_tokens=SPLIT_TOKENS))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = median_ms(lambda: F.scaled_dot_product_attention(q, k_all, v_all, is_causal=True))
    name = f"c{channels}_h{heads}"
    figures[f"prefill_{name}"] = figure(flash / ours, "x torch flash", target)
    figures[f"prefill_{name}_tf"] = figure(tflop / ours, "TFLOP/s", "")
    peers[f"torch_flash_{name}"] = {"value": tflop / flash, "unit": "TFLOP/s", "version": torch.__version__}


def packed(figures: dict, name: str, lengths: Sequence[int], targets: tuple[str, str]) -> None:
    """Training attention over one pack, H16 KV8 C128."""
    heads, kv_heads, channels = 16, 8, 128
    cu_tokens = [0, *accumulate(lengths)]
    q = _bf16(cu_tokens[-1], heads, channels, grad=True)
    k, v = (_bf16(cu_tokens[-1], kv_heads, channels, grad=True) for _ in range(2))
    do = _bf16(cu_tokens[-1], heads, channels)
    tflop = sum(2 * length**2 * heads * channels for length in lengths) / 1e9
    o = packed_attention(q, k, v, cu_tokens)
    with torch.no_grad():
        forward = median_ms(lambda: packed_attention(q, k, v, cu_tokens))
    backward = median_ms(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
    figures[f"packed_{name}_forward"] = figure(tflop / forward, "TFLOP/s", targets[0])
    figures[f"packed_{name}_backward"] = figure(2.5 * tflop / backward, "TFLOP/s", targets[1])


def run(quick: bool) -> dict:
    """Figures and peers of this module; raises CheckFailed where a result is wrong."""
    figures: dict = {}
    peers: dict = {}
    torch.manual_seed(0)
    copy = copy_gb_per_s()
    peers["device_copy"] = {"value": copy, "unit": "GB/s", "version": torch.__version__}
    decode(figures, 128, copy, ">= 0.65")
    prefill(figures, peers, 16, 8, 128, ">= 1.2")
    prefill(figures, peers, 9, 3, 64, ">= 1.0")
    packed(figures, "8x8192", [8192] * 8, (">= 500", ">= 450"))
    if not quick:
        decode(figures, 64, copy, "")
        prefill(figures, peers, 32, 8, 64, ">= 1.0")
        packed(figures, "1x65536", [65536], (">= 500", ">= 450"))
        packed(figures, "64x1024", [1024] * 64, ("", ""))
        mixed = [100, 5000, 8192, 300, 1700, 12000, 64, 33, 4000, 1, 8192, 9000, 7000, 700, 3000, 6252]
        packed(figures, "mixed", mixed, ("", ""))
    return {
        "figures": figures,
        "peers": peers,
        "env": environment(f"decode 64 x 8192; prefill 16384; pages of {PAGE_TOKENS}, cuts of {SPLIT_TOKENS}"),
    }
