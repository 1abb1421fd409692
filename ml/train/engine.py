"""DeepSpeed behind a small interface: ZeRO-1 or ZeRO-3 over fp32 masters, gradients summed over all micro-batches.

The module's own parameters are the fp32 master. Its layers cast values and products themselves (`ml.linear`), so
DeepSpeed runs in plain fp32 without its torch_autocast section: that section would gather and reduce the weights of
some classes in bf16, and a quantiser must read the master. Accumulation is unmanaged: every backward adds, `step`
alone is the boundary, so that the number of micro-batches may differ from step to step.

Invariant: `loss` given to backward is this rank's share of the mini-batch's loss; the gradient that the optimizer
sees is the sum over ranks and micro-batches (DeepSpeed's average over ranks is undone). After an update no linear
relies on what it knew of its weight, nor multiplies by what it held of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ml.device import traits
from ml.linear import Fp8Weights, Linear
from ml.train.loss import Student
from schemas.errors import ContractError

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class EngineSettings:
    """AdamW and ZeRO. warmup_steps: the rate rises linearly over the run's first steps. gradient_clip: norm."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    warmup_steps: int = 0
    zero_stage: Literal[1, 3] = 1


class TrainEngine:
    """Trains one module on one device. steps_done: optimizer steps of the run so far, for the warm-up."""

    def __init__(self, module: Student, settings: EngineSettings, *, device: torch.device, steps_done: int = 0) -> None:
        self._settings, self.device, self._steps_done = settings, device, steps_done
        self._engine = _initialize(module.to(device), settings, device)
        self._fp8_weights = Fp8Weights([m for _, m in self._linears()], whole=settings.zero_stage == 1)
        self._fp8_weights.renew()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._engine(*arguments, **options)

    @property
    def module(self) -> Student:
        return self._engine.module

    def fp8_inexact(self) -> list[str]:
        """Weight names of the linears that were asked for FP8 since the last step and computed in bf16."""
        return [f"{name}.weight" for name, linear in self._linears() if linear.fp8_exact is False]

    def _linears(self) -> Iterator[tuple[str, Linear]]:
        return ((name, m) for name, m in self.module.transformer.named_modules() if isinstance(m, Linear))

    def backward(self, loss: torch.Tensor) -> None:
        """Add this micro-batch's gradient. Every rank calls it equally often between two steps."""
        self._engine.backward(loss * dist.get_world_size())

    def step(self) -> float:
        """Clip and update; returns the gradient's norm before clipping.

        Raises ContractError for a gradient that is not finite, which DeepSpeed would skip silently.
        """
        warmup = self._settings.warmup_steps
        share = min(1.0, (self._steps_done + 1) / warmup) if warmup else 1.0
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * share
        self._engine.step()
        # Here, beside the update, since the norm is waited for anyway.
        self._fp8_weights.renew()
        norm = float(self._engine.get_global_grad_norm() or 0.0)
        if not self._engine.was_step_applied() or not norm < float("inf"):
            raise ContractError(
                f"optimizer step {self._steps_done}",
                expected="a finite gradient",
                found=f"norm {norm}",
                safe="the student as it was before this iteration",
            )
        self._steps_done += 1
        return norm

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the module, whole fp32 master on the CPU), one at a time; a collective call on every rank."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self._engine.module.named_parameters():
            yield name, _cpu(safe_get_full_fp32_param(parameter))

    def moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """("exp_avg.NAME" and "exp_avg_sq.NAME", whole fp32 on the CPU), after a step; collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        for name, parameter in self._engine.module.named_parameters():
            for moment in MOMENTS:
                yield f"{moment}.{name}", _cpu(safe_get_full_optimizer_state(parameter, moment))

    def load_moments(self, read: Callable[[str], torch.Tensor], steps: int) -> None:
        """Continue Adam with moments from read(key) -> whole tensor, before the first step here.

        steps: updates that made them, for the bias correction. Works for any number of ranks and either stage.
        """
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        optimizer = self._engine.optimizer
        stage3 = self._settings.zero_stage == 3
        flat = optimizer.fp32_partitioned_groups_flat if stage3 else optimizer.single_partition_of_fp32_groups
        for partition in flat:
            state = {moment: torch.zeros_like(partition) for moment in MOMENTS}
            # Fused AdamW counts its steps on the device.
            optimizer.optimizer.state[partition] = {
                "step": torch.tensor(float(steps), device=partition.device),
                **state,
            }
        if not stage3:
            optimizer._lazy_init_hp_params_optimizer_state()
        rank = dist.get_rank()
        for name, parameter in self._engine.module.named_parameters():
            for moment in MOMENTS:
                whole = read(f"{moment}.{name}").to(self.device, torch.float32)
                if not stage3:
                    safe_set_full_optimizer_state(parameter, whole, moment)
                    continue
                # A rank's part of a ZeRO-3 parameter is padded to equal lengths.
                part = parameter.ds_tensor.ds_numel
                padded = torch.zeros(part * dist.get_world_size(), device=self.device)
                padded[: whole.numel()] = whole.flatten()
                safe_set_local_optimizer_state(parameter, padded[rank * part : (rank + 1) * part], moment)

    def close(self) -> None:
        self._engine.destroy()


def _initialize(module: Student, settings: EngineSettings, device: torch.device) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")  # deepspeed asks for it even when it sets up no group
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # On a machine with a compiler deepspeed would build its shared-memory all-reduce at start; gloo does that work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch's own AdamW: DeepSpeed's CPU and fused ones are compiled at first use.
    optimizer = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    # DeepSpeed overlaps unmanaged accumulation only where gradients are partitioned.
    overlap = traits(device).overlap and settings.zero_stage == 3
    zero: dict[str, Any] = {"stage": settings.zero_stage, "overlap_comm": overlap}
    bucket_elements = traits(device).bucket_elements
    if bucket_elements is not None and settings.zero_stage == 1:
        zero |= {"reduce_bucket_size": bucket_elements, "contiguous_gradients": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.gradient_clip,
        "zero_optimization": zero,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    engine, _, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def _cpu(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise RuntimeError("DeepSpeed keeps no state of this parameter")
    return tensor.detach().to("cpu", torch.float32)
