"""What a finished rollout partition writes: its token shard, its rows, and the manifest that makes them count.

Invariant: shard and content columns are a function of the requests and their responses; the epoch, the worker and
the history of interruptions show only in keys and in observed columns.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.store import ObjectStore
from schemas import keys, shards
from schemas.interruptions import UNINTERRUPTED, Interruptions
from schemas.rows import json_lines
from schemas.work.manifest import RolloutManifest, StoredObject
from schemas.work.rollout import RolloutRequest


@dataclass(frozen=True)
class Response:
    """A finished trajectory's columns, [response tokens] each: int32, float32, float32, uint8.

    error: why it was given up at this length; empty for all others.
    """

    ids: np.ndarray
    logprobs_raw: np.ndarray
    logprobs_sampled: np.ndarray
    sampled_mask: np.ndarray
    finish_reason: str
    interruptions: Interruptions = UNINTERRUPTED
    error: str = ""


def publish(
    store: ObjectStore,
    key: Callable[[str], str],
    requests: Sequence[RolloutRequest],
    responses: Sequence[Response],
    reward: Callable[[RolloutRequest, list[int]], float | None],
    common: dict[str, Any],
) -> RolloutManifest:
    """Writes shard and rows of requests and their responses, in the given order; returns the partition manifest.

    key(name): object key of this epoch's owner. common: columns that all rows share (run_id, iteration, partition,
    student_version).
    """
    shard = token_shard([r.prompt_ids for r in requests], responses)
    placed = {"shard_digest": keys.digest_bytes(shard), "shard_key": key("tokens.safetensors")}
    store.put(placed["shard_key"], shard)
    rows, first_prompt_row, first_row = [], 0, 0
    for request, response in zip(requests, responses, strict=True):
        start = {"first_prompt_row": first_prompt_row, "first_row": first_row}
        value = None if response.error else reward(request, response.ids.tolist())
        rows.append(common | placed | start | _row(request, response, value))
        first_prompt_row += len(request.prompt_ids)
        first_row += len(response.ids)
    rows_data = json_lines(rows)
    store.put(key("rows.jsonl"), rows_data)
    sums = ("sampled_tokens", "num_preemptions", "num_kv_restores", "num_prefill_rebuilds")
    return RolloutManifest(
        objects=(StoredObject(placed["shard_key"], placed["shard_digest"], len(shard)),),
        rows_key=key("rows.jsonl"),
        rows_digest=keys.digest_bytes(rows_data),
        num_rows=len(rows),
        given_up={r.trajectory_id: a.error for r, a in zip(requests, responses, strict=True) if a.error},
        stats={name: sum(row[name] for row in rows) for name in sums},
    )


def _row(request: RolloutRequest, response: Response, reward: float | None) -> dict[str, Any]:
    return {
        "trajectory_id": request.trajectory_id,
        "prompt_id": request.prompt_id,
        "sample_index": request.sample_index,
        "split": request.split,
        "status": "given_up" if response.error else "finished",
        "finish_reason": response.finish_reason,
        "prompt_tokens": len(request.prompt_ids),
        "response_tokens": len(response.ids),
        "sampled_tokens": int(response.sampled_mask.sum()),
        "reward": reward,
        "worker": f"{socket.gethostname()}:{os.getpid()}",
        "num_preemptions": response.interruptions.preemptions,
        "num_prefill_rebuilds": response.interruptions.prefill_rebuilds,
        "num_kv_restores": response.interruptions.kv_restores,
    }


def token_shard(prompts: Sequence[Sequence[int]], responses: Sequence[Response]) -> bytes:
    """prompt_ids I32 [prompt tokens]; response_ids I32, logprobs_raw and logprobs_sampled F32, sampled_mask U8
    [response tokens]; trajectories one after another in the given order."""
    return shards.encode_tokens(
        {
            "prompt_ids": ("I32", np.array([i for prompt in prompts for i in prompt], np.int32)),
            "response_ids": ("I32", np.concatenate([r.ids for r in responses])),
            "logprobs_raw": ("F32", np.concatenate([r.logprobs_raw for r in responses])),
            "logprobs_sampled": ("F32", np.concatenate([r.logprobs_sampled for r in responses])),
            "sampled_mask": ("U8", np.concatenate([r.sampled_mask for r in responses])),
        }
    )
