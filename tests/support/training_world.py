"""A made-up iteration for tests of training: random trajectories, hidden states and a plan, as bytes and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from schemas import keys, shards

RUN = {"run_id": "tiny", "iteration": 0}


@dataclass
class Blobs:
    """A BlobReader over a dictionary; counts bytes read by range."""

    objects: dict[str, bytes] = field(default_factory=dict)

    def get(self, key: str) -> bytes:
        return self.objects[key]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.objects[key][start : start + length]


@dataclass
class Trajectory:
    trajectory_id: str
    prompt: np.ndarray
    response: np.ndarray
    mask: np.ndarray
    logged: np.ndarray
    hidden: dict[int, np.ndarray]  # teacher_index -> bf16 as uint16, [response, E]

    @property
    def behaviour(self) -> np.ndarray:
        """Log-probabilities of the distribution that was sampled from, which are not the raw ones."""
        return np.float32(0.5) * self.logged

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass
class World:
    """trajectories by id, the objects that hold them, and their table rows."""

    blobs: Blobs
    trajectories: dict[str, Trajectory]
    trajectory_rows: list[dict[str, Any]]
    hidden_rows: list[dict[str, Any]]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round-to-nearest-even bf16 as uint16, for finite values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def make_world(
    lengths: list[tuple[int, int]], widths: dict[int, int], *, vocab: int, seed: int = 0, masked: float = 0.2
) -> World:
    """Trajectories of (prompt, response) tokens; every one has hidden states of every teacher of `widths`.

    About a share `masked` of the response tokens were not sampled (observations).
    """
    rng = np.random.default_rng(seed)
    trajectories = {}
    for number, (prompt, response) in enumerate(lengths):
        mask = (rng.random(response) >= masked).astype(np.uint8)
        mask[-1] = 1
        trajectories[f"t{number:03d}"] = Trajectory(
            f"t{number:03d}",
            rng.integers(0, vocab, prompt).astype(np.int32),
            rng.integers(0, vocab, response).astype(np.int32),
            mask,
            (-5 * rng.random(response)).astype(np.float32),
            {t: to_bf16(rng.standard_normal((response, width))) for t, width in widths.items()},
        )
    return world_of(trajectories)


def world_of(trajectories: dict[str, Trajectory]) -> World:
    """Objects and rows of trajectories: one token shard, one hidden-state object a teacher."""
    parts = [trajectories[i] for i in sorted(trajectories)]
    shard = shards.encode_tokens(
        {
            "prompt_ids": ("I32", np.concatenate([t.prompt for t in parts])),
            "response_ids": ("I32", np.concatenate([t.response for t in parts])),
            "logprobs_raw": ("F32", np.concatenate([t.logged for t in parts])),
            "logprobs_sampled": ("F32", np.concatenate([t.behaviour for t in parts])),
            "sampled_mask": ("U8", np.concatenate([t.mask for t in parts])),
        }
    )
    blobs = Blobs({"rollout/tokens.safetensors": shard})
    trajectory_rows, hidden_rows = [], []
    prompt_row = row = 0
    for t in parts:
        trajectory_rows.append(
            RUN
            | {
                "trajectory_id": t.trajectory_id, "prompt_id": "p", "first_prompt_row": prompt_row,
                "prompt_tokens": len(t.prompt), "first_row": row, "response_tokens": len(t.response),
                "sampled_tokens": int(t.mask.sum()), "shard_key": "rollout/tokens.safetensors",
                "shard_digest": keys.digest_bytes(shard),
            }
        )  # fmt: skip
        prompt_row, row = prompt_row + len(t.prompt), row + len(t.response)
    for teacher in sorted(parts[0].hidden):
        key = f"teach/hidden-{teacher}.safetensors"
        data = shards.encode({"hidden": ("BF16", np.concatenate([t.hidden[teacher] for t in parts]))})
        blobs.objects[key] = data
        first = 0
        for t in parts:
            states = t.hidden[teacher]
            hidden_rows.append(
                RUN
                | {
                    "trajectory_id": t.trajectory_id, "teacher_index": teacher, "teacher_id": f"teacher-{teacher}",
                    "first_token_row": 0, "first_object_row": first, "rows": len(states), "dtype": "BF16",
                    "width": states.shape[1], "block_crcs": shards.block_crcs(states),
                    "object_digest": keys.digest_bytes(data), "object_key": key,
                }
            )  # fmt: skip
            first += len(states)
    return World(blobs, trajectories, trajectory_rows, hidden_rows)


def plan_rows(
    world: World,
    steps: Sequence[Sequence[Sequence[tuple[str, int | None, float]]]],
    *,
    slots: int,
    split: str = "train",
) -> list[dict[str, Any]]:
    """PLAN rows. steps[i][pack] lists (trajectory_id, teacher_index, weight) in order; pack p -> slot p mod slots."""
    rows = []
    for step, packs in enumerate(steps):
        members = {i for pack in packs for i, _, _ in pack}
        denominator = sum(int(world.trajectories[i].mask.sum()) for i in members)
        for pack_id, pack in enumerate(packs):
            offset = 0
            for trajectory_id, teacher_index, weight in pack:
                length = world.trajectories[trajectory_id].length
                rows.append(
                    RUN
                    | {
                        "split": split, "step": step, "rank_slot": pack_id % slots, "micro_batch": pack_id // slots,
                        "pack_id": pack_id, "offset": offset, "length": length, "trajectory_id": trajectory_id,
                        "teacher_index": teacher_index, "weight": weight, "denominator_tokens": denominator,
                    }
                )  # fmt: skip
                offset += length
    return rows


def write_store(world: World, folder: Path) -> Path:
    """The world's objects as files of a local object store."""
    for key, data in world.blobs.objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder
