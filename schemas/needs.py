"""What objectives may want of a trajectory; no pydantic, no torch."""

from __future__ import annotations

from typing import Literal

#: Beside its tokens: hidden states of a teacher; of each sampled token its log-probability under the distribution that
#: it was sampled from; an advantage.
Need = Literal["teacher_states", "behaviour_logprobs", "advantage"]
#: The objective of plan rows that name none.
UNNAMED_OBJECTIVE = "kl"
