"""A rollout worker that a trajectory kills or makes stand still: `python -m tests.support.poisoned_rollout WORK`.

OPD_TEST_POISON is JSON: {trajectory_id: [tokens, "die" | "die with driver" | "hang" | "starve"]}, done once it holds so
many tokens and is among the sequences that may be in the cache.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from ml.rollout.engine import RolloutEngine
from tasks.ranks import rollout

_POISON = json.loads(os.environ["OPD_TEST_POISON"])
_add, _step = RolloutEngine.add, RolloutEngine.step
_waiting: list[str] = []


def add(self, request):
    _waiting.append(request.trajectory_id)
    _add(self, request)


def step(self):
    live = self.live()
    starved = False
    for trajectory_id in _waiting[: self.config.max_sequences]:
        tokens, how = _POISON.get(trajectory_id, (1 << 30, ""))
        if live[trajectory_id] >= tokens:
            if how == "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif how == "die with driver":
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "hang":
                time.sleep(600)
            # A worker whose steps go on without a token for its oldest; by its end nothing else is left to sample.
            starved = trajectory_id == _waiting[0]
    if starved:
        time.sleep(0.01)
        return []
    finished = _step(self)
    for one in finished:
        _waiting.remove(one.trajectory_id)
    return finished


RolloutEngine.add, RolloutEngine.step = add, step

if __name__ == "__main__":
    sys.exit(rollout.main(sys.argv[1:]))
