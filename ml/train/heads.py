"""Teacher heads on a device: at most one is resident, and each is loaded at most once a mini-batch.

The order of the plan makes this cheap: every rank walks the teachers in one order. A head that the next mini-batch
starts with stays. Letters: V shared vocabulary, E teacher width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from schemas.errors import ContractError


class TeacherHeads:
    """read: teacher_index -> head [rows, E] of any float dtype, rows >= vocab_size."""

    def __init__(self, read: Callable[[int], torch.Tensor], *, vocab_size: int, device: torch.device) -> None:
        self._read, self._vocab_size, self._device = read, vocab_size, device
        self._resident: tuple[int, torch.Tensor] | None = None
        self._loads: Counter[int] = Counter()

    def use(self, teacher_index: int) -> torch.Tensor:
        """u_VE, bfloat16 like the hidden states it meets; valid until another teacher is used.

        Raises ContractError for a head with fewer rows than the shared vocabulary.
        """
        if self._resident is not None and self._resident[0] == teacher_index:
            return self._resident[1]
        self._resident = None  # freed before its successor is read: two heads never coexist
        u_VE = self._read(teacher_index)
        if u_VE.dim() != 2 or u_VE.shape[0] < self._vocab_size:
            raise ContractError(
                f"head of teacher {teacher_index}",
                expected=f"a matrix of at least {self._vocab_size} rows, the shared vocabulary",
                found=str(list(u_VE.shape)),
            )
        u_VE = u_VE[: self._vocab_size].to(self._device, torch.bfloat16)
        self._loads[teacher_index] += 1
        self._resident = teacher_index, u_VE
        return u_VE

    def take_loads(self) -> dict[int, int]:
        """Loads of each teacher since the last call."""
        loads, self._loads = dict(self._loads), Counter()
        return loads
