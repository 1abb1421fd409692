"""linear_kl in plain torch, fp32 sums throughout: the CPU path, and the yardstick of the kernel.

FP8 is a matter of operands: they are rounded to their blocks' codes, and multiplied as the fp32 values of these.

Legend: N packed tokens, R tokens of one teacher, A active tokens (weight not 0), C tokens of a chunk, D student
width, E teacher width, V vocabulary.
Invariant: masked rows are dropped before anything is computed from them; a chunk holds at most `chunk_bytes` of
logits and what is made of them, or one row.
"""

from __future__ import annotations

import torch

from kernels.quant import fp8_dequantize, fp8_quantize_rows, fp8_quantize_tiles

# Tokens that share a scale where a product sums over tokens, and rows of a tile of a head.
_BLOCK = 128
# Rows of a bf16 head that are widened to fp32 at a time; the head is never whole in fp32.
_HEAD_ROWS = 8192
# fp32 values alive for each logit: both logits, both probabilities, their difference and one temporary.
_BYTES_PER_LOGIT = 24


def forward(h_ND, w_VD, teachers, weight_N, plan):
    """kl_N fp32, and the gradients of sum(weight_N * kl_N): in h_ND's dtype and in fp32 (None if not wanted)."""
    kl_N = torch.zeros(h_ND.shape[0], dtype=torch.float32, device=h_ND.device)
    grad_h_ND = torch.zeros_like(h_ND) if plan.want_h else None
    grad_w_VD = torch.zeros_like(w_VD, dtype=torch.float32) if plan.want_w else None
    w_values_VD = w_VD[: plan.vocab_size].to(h_ND.dtype)
    add = _add_fp8 if plan.fp8_gradients else _add
    first = 0
    for teacher in teachers:
        rows = slice(first, first + len(teacher.t_RE))
        first = rows.stop
        if len(teacher.t_RE):
            into = kl_N[rows], None if grad_h_ND is None else grad_h_ND[rows], grad_w_VD
            # The head is no local here: it is gone before the next one is asked for.
            add(h_ND[rows], w_values_VD, teacher.t_RE, teacher.head(), weight_N[rows], plan, *into)
    return kl_N, grad_h_ND, grad_w_VD


def _add(h_RD, w_values_VD, t_RE, u_VE, weight_R, plan, kl_R, grad_h_RD, grad_w_VD):
    """One teacher's rows: sets kl_R and grad_h_RD, which are zero, and adds to grad_w_VD."""
    V = plan.vocab_size
    u_values_VE = u_VE[:V].to(t_RE.dtype)
    active_A = weight_R.nonzero().squeeze(1)
    for rows_C in active_A.split(max(1, plan.chunk_bytes // (_BYTES_PER_LOGIT * V))):
        h_CD = h_RD[rows_C].float()
        student_CV = _logits(h_CD, w_values_VD).div_(plan.temperature)
        teacher_CV = _logits(t_RE[rows_C].float(), u_values_VE).div_(plan.temperature)
        kl_C, slope_CV = _kl(student_CV, teacher_CV, plan.divergence)
        kl_R[rows_C] = kl_C
        slope_CV.mul_((weight_R[rows_C] / plan.temperature).unsqueeze(1))
        if grad_h_RD is not None:
            grad_h_CD = torch.zeros_like(h_CD)
            for part in _parts(V):
                grad_h_CD.addmm_(slope_CV[:, part], w_values_VD[part].float())
            grad_h_RD[rows_C] = grad_h_CD.to(h_RD.dtype)
        if grad_w_VD is not None:
            grad_w_VD[:V].addmm_(slope_CV.t(), h_CD)


def _add_fp8(h_RD, w_values_VD, t_RE, u_VE, weight_R, plan, kl_R, grad_h_RD, grad_w_VD):
    """As `_add`. Masked rows stay in place as zeros: which tokens share a scale depends on no mask and no chunks."""
    V = plan.vocab_size
    u_values_VE = u_VE[:V].to(t_RE.dtype)
    chunk_rows = max(_BLOCK, plan.chunk_bytes // (_BYTES_PER_LOGIT * V) // _BLOCK * _BLOCK)
    for first in range(0, h_RD.shape[0], chunk_rows):
        rows_C = slice(first, first + chunk_rows)
        live_C1 = (weight_R[rows_C] != 0).unsqueeze(1)
        h_CD = h_RD[rows_C].float().masked_fill(~live_C1, 0.0)
        t_CE = t_RE[rows_C].float().masked_fill(~live_C1, 0.0)
        if plan.fp8_logits:
            student_CV = _logits(_round_rows(h_CD), w_values_VD, _round_tiles)
            teacher_CV = _logits(_round_rows(t_CE), u_values_VE, _round_tiles)
        else:
            student_CV, teacher_CV = _logits(h_CD, w_values_VD), _logits(t_CE, u_values_VE)
        kl_C, slope_CV = _kl(student_CV.div_(plan.temperature), teacher_CV.div_(plan.temperature), plan.divergence)
        kl_R[rows_C] = kl_C.masked_fill(~live_C1.squeeze(1), 0.0)
        slope_CV.mul_((weight_R[rows_C] / plan.temperature).unsqueeze(1))
        slope_CV = _round_rows(slope_CV)
        if grad_h_RD is not None:
            grad_h_CD = torch.zeros_like(h_CD)
            for part in _parts(V):
                grad_h_CD.addmm_(slope_CV[:, part], _round_tiles(w_values_VD[part].float()))
            grad_h_RD[rows_C] = grad_h_CD.to(h_RD.dtype)
        if grad_w_VD is not None:
            grad_w_VD[:V].addmm_(_round_rows(slope_CV.t()), _round_tiles(h_CD))


def _round_rows(x_MK):
    """The values of x in FP8 blocks of 1 x 128."""
    return fp8_dequantize(*fp8_quantize_rows(x_MK, impl="reference"), torch.float32)


def _round_tiles(w_NK):
    """The values of w in FP8 tiles of 128 x 128."""
    return fp8_dequantize(*fp8_quantize_tiles(w_NK, impl="reference"), torch.float32)


def scale(gradient, factor):
    """Multiply in place by a scalar tensor."""
    gradient.mul_(factor)


def _parts(num_rows):
    return [slice(first, min(first + _HEAD_ROWS, num_rows)) for first in range(0, num_rows, _HEAD_ROWS)]


def _logits(h_CD, w_VD, round_values=lambda values: values):
    logits_CV = torch.empty(h_CD.shape[0], w_VD.shape[0], dtype=torch.float32, device=h_CD.device)
    for part in _parts(w_VD.shape[0]):
        torch.mm(h_CD, round_values(w_VD[part].float()).t(), out=logits_CV[:, part])
    return logits_CV


def _kl(student_CV, teacher_CV, divergence):
    """(kl_C, derivative of kl_C by the student's logits). Overwrites both logits.

    Each side is shifted by its own maximum, and the normalisers enter as the logarithm of their ratio: for nearly
    equal sides that ratio is nearly 1 and the cancellation of two large log-sum-exps never happens.
    """
    student_CV -= student_CV.amax(1, keepdim=True)
    teacher_CV -= teacher_CV.amax(1, keepdim=True)
    q_CV, p_CV = student_CV.exp(), teacher_CV.exp()
    student_sum_C1, teacher_sum_C1 = q_CV.sum(1, keepdim=True), p_CV.sum(1, keepdim=True)
    log_ratio_C1 = torch.log1p((teacher_sum_C1 - student_sum_C1) / student_sum_C1)
    log_odds_CV = student_CV.sub_(teacher_CV).add_(log_ratio_C1)  # log q - log p
    q_CV /= student_sum_C1
    p_CV /= teacher_sum_C1
    if divergence == "reverse":
        kl_C = (q_CV * log_odds_CV).sum(1)
        return kl_C, log_odds_CV.sub_(kl_C.unsqueeze(1)).mul_(q_CV)
    return -(p_CV * log_odds_CV).sum(1), q_CV.sub_(p_CV)
