"""From plan rows to frames: which sequences one forward pass reads, and how they lie in one run of bytes.

A frame is one micro-batch of one rank. `schedule` puts the frames of an iteration in the order in which the ranks
consume them (frame i belongs to rank i mod R; ranks walk micro-batches first, then slots, so that teachers come in
one order everywhere). A frame's layout follows from its plan rows alone, so writer and readers need no header.

    held-out packs | step 0 | step 1 | ... | held-out packs again

Letters: N packed tokens, R loss rows (one a response token), E teacher width.
Row i of a sequence is the state that predicts its response token i: the last prompt position predicts token 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import numpy as np

from schemas.errors import ContractError
from schemas.needs import UNNAMED_OBJECTIVE, Need

Phase = Literal["before", "train", "after"]
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class HiddenRange:
    """Rows of one object that hold hidden states of one trajectory."""

    object_key: str
    first_token_row: int
    first_object_row: int
    rows: int
    width: int
    block_crcs: tuple[int, ...]


@dataclass(frozen=True)
class PackedSequence:
    """One plan row with everything needed to read it. needs: of its objective; advantage: None where it needs none;
    teacher_index is None, and there are no hidden states, where it needs no teacher."""

    trajectory_id: str
    objective: str
    needs: frozenset[Need]
    teacher_index: int | None
    advantage: float | None
    weight: float
    shard_key: str
    shard_digest: str
    first_prompt_row: int
    prompt_tokens: int
    first_row: int
    response_tokens: int
    hidden: tuple[HiddenRange, ...]

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class Frame:
    """One micro-batch of one slot; without sequences it is empty and carries no loss."""

    phase: Phase
    step: int
    micro_batch: int
    slot: int
    denominator_tokens: int
    sequences: tuple[PackedSequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.length for s in self.sequences)


@dataclass(frozen=True)
class FrameArrays:
    """Views into a frame's bytes. bf16 hidden states travel as uint16, an array a segment, of width 0 without a
    teacher. behaviour_R is empty unless an objective of the frame needs it."""

    ids_N: np.ndarray
    positions_N: np.ndarray
    cu_tokens: np.ndarray
    rows_R: np.ndarray
    response_R: np.ndarray
    weight_R: np.ndarray
    logged_R: np.ndarray
    behaviour_R: np.ndarray
    hidden_RE: tuple[np.ndarray, ...] = field(default=())


def segments(frame: Frame) -> list[tuple[PackedSequence, ...]]:
    """Runs of sequences of one objective and one teacher, or of none, in the order of the pack."""
    runs = groupby(frame.sequences, key=lambda s: (s.objective, s.teacher_index))
    return [tuple(run) for _, run in runs]


def with_behaviour(frame: Frame) -> bool:
    """Whether the frame holds the log-probabilities of the distribution that its tokens were sampled from."""
    return any("behaviour_logprobs" in s.needs for s in frame.sequences)


def layout(frame: Frame) -> tuple[list[tuple[int, type[np.generic], tuple[int, ...]]], int]:
    """(byte offset, dtype, shape) of each array of FrameArrays, hidden states last, and the frame's bytes."""
    num_rows = sum(s.response_tokens for s in frame.sequences)
    parts: list[tuple[type[np.generic], tuple[int, ...]]] = [
        (np.int32, (frame.num_tokens,)),
        (np.int32, (frame.num_tokens,)),
        (np.int32, (len(frame.sequences) + 1,)),
        (np.int32, (num_rows,)),
        (np.int32, (num_rows,)),
        (np.float32, (num_rows,)),
        (np.float32, (num_rows,)),
        (np.float32, (num_rows if with_behaviour(frame) else 0,)),
    ]
    for run in segments(frame):
        width = run[0].hidden[0].width if run[0].hidden else 0
        parts.append((np.uint16, (sum(s.response_tokens for s in run), width)))
    out, offset = [], 0
    for dtype, shape in parts:
        out.append((offset, dtype, shape))
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        offset += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    return out, offset


def largest_frame_bytes(pack_tokens: int, width: int, num_teachers: int, *, behaviour: bool = False) -> int:
    """Bytes that no frame of a pack exceeds, whatever its sequences. width: of the widest teacher, 0 without any.
    behaviour: with the log-probabilities of `with_behaviour`."""
    sequences, by_row = pack_tokens // 2, 5 if behaviour else 4
    arrays = [4 * pack_tokens] * 2 + [4 * (sequences + 1)] + [4 * pack_tokens] * by_row + [2 * width * pack_tokens]
    return sum(arrays) + _ALIGN_BYTES * (len(arrays) + num_teachers)


def view(frame: Frame, data: memoryview) -> FrameArrays:
    """The frame's arrays over its bytes, without a copy."""
    arrays = [
        np.frombuffer(data, dtype, count=int(np.prod(shape, dtype=np.int64)), offset=offset).reshape(shape)
        for offset, dtype, shape in layout(frame)[0]
    ]
    return FrameArrays(*arrays[:8], hidden_RE=tuple(arrays[8:]))


def schedule(
    plan_rows: Iterable[Mapping[str, Any]],
    trajectory_rows: Iterable[Mapping[str, Any]],
    hidden_rows: Iterable[Mapping[str, Any]],
    *,
    ranks: int,
    needs: Mapping[str, frozenset[Need]],
    first_step: int = 0,
) -> list[Frame]:
    """All frames in order of consumption; every group of `ranks` frames is one wave, one frame a rank.

    Rows are those of schemas.rows PLAN, TRAJECTORIES and HIDDEN_SHARDS. needs: of each objective that the plan may
    name. first_step > 0 continues a plan: the held-out packs before the first step and the steps before it are left
    out. Raises ContractError where the plan names another objective, a trajectory or hidden rows that are not there,
    where a row lacks what its objective needs, or where offsets do not tile the pack.
    """
    trajectories = {row["trajectory_id"]: row for row in trajectory_rows}
    hidden: dict[tuple[str, int], list[HiddenRange]] = {}
    for row in hidden_rows:
        hidden.setdefault((row["trajectory_id"], row["teacher_index"]), []).append(_hidden_range(row))
    packs: dict[tuple[str, int], dict[tuple[int, int], list[Mapping[str, Any]]]] = {}
    for row in plan_rows:
        step = packs.setdefault((row["split"], row["step"]), {})
        step.setdefault((row["micro_batch"], row["rank_slot"]), []).append(row)
    heldout = [key for key in packs if key[0] == "heldout"]
    steps = sorted(key for key in packs if key[0] == "train" and key[1] >= first_step)
    order: tuple[tuple[Phase, list[tuple[str, int]]], ...] = (
        ("before", heldout if first_step == 0 else []),
        ("train", steps),
        ("after", heldout),
    )
    frames: list[Frame] = []
    for phase, mini_batches in order:
        for key in mini_batches:
            frames += _waves(phase, key, packs[key], trajectories, hidden, needs, ranks)
    return frames


def _waves(phase, key, packs, trajectories, hidden, needs, ranks) -> Iterator[Frame]:
    """Frames of one mini-batch, padded with empty ones so that every rank has the same number of micro-batches."""
    where = f"plan, {key[0]}, step {key[1]}"
    denominators = {row["denominator_tokens"] for rows in packs.values() for row in rows}
    if len(denominators) != 1 or min(denominators) < 1:
        raise ContractError(where, expected="one positive denominator_tokens", found=str(sorted(denominators)))
    denominator = denominators.pop()
    num_micro_batches = 1 + max(micro_batch for micro_batch, _ in packs)
    num_slots = 1 + max(slot for _, slot in packs)
    waves = ((m, first) for m in range(num_micro_batches) for first in range(0, num_slots, ranks))
    for micro_batch, first in waves:
        slots = range(first, first + ranks)
        if not any((micro_batch, slot) in packs for slot in slots):
            continue
        for slot in slots:
            rows = packs.get((micro_batch, slot), [])
            sequences = _sequences(
                rows, trajectories, hidden, needs, f"{where}, slot {slot}, micro-batch {micro_batch}"
            )
            yield Frame(phase, key[1], micro_batch, slot, denominator, sequences)


def _sequences(rows, trajectories, hidden, needs, where) -> tuple[PackedSequence, ...]:
    out, end = [], 0
    for row in sorted(rows, key=lambda r: (r["pack_id"], r["offset"])):
        trajectory_id, teacher_index = row["trajectory_id"], row["teacher_index"]
        trajectory, objective = trajectories.get(trajectory_id), row.get("objective") or UNNAMED_OBJECTIVE
        if trajectory is None:
            raise ContractError(f"{where}, trajectory {trajectory_id}", expected="its trajectories row", found="none")
        if objective not in needs:
            raise ContractError(
                f"{where}, trajectory {trajectory_id}, objective", expected=" or ".join(sorted(needs)), found=objective
            )
        sequence = PackedSequence(
            trajectory_id, objective, needs[objective], teacher_index, row.get("advantage"), float(row["weight"]),
            trajectory["shard_key"], trajectory["shard_digest"], trajectory["first_prompt_row"],
            trajectory["prompt_tokens"], trajectory["first_row"], trajectory["response_tokens"],
            tuple(sorted(hidden.get((trajectory_id, teacher_index), ()), key=lambda h: h.first_token_row)),
        )  # fmt: skip
        if (row["offset"], row["length"]) != (end, sequence.length):
            raise ContractError(
                f"{where}, trajectory {trajectory_id}",
                expected=f"offset {end} and length {sequence.length}",
                found=f"offset {row['offset']} and length {row['length']}",
            )
        _check_sequence(sequence, where)
        end += sequence.length
        out.append(sequence)
    return tuple(out)


def _check_sequence(sequence: PackedSequence, where: str) -> None:
    where = f"{where}, trajectory {sequence.trajectory_id}, teacher {sequence.teacher_index}"
    if sequence.prompt_tokens < 1 or sequence.response_tokens < 1:
        raise ContractError(
            where,
            expected="at least one prompt token and one response token",
            found=f"{sequence.prompt_tokens} and {sequence.response_tokens}",
        )
    for need, value in (("teacher_states", sequence.teacher_index), ("advantage", sequence.advantage)):
        if (need in sequence.needs) != (value is not None):
            raise ContractError(
                where, expected=f"what objective {sequence.objective} needs: {', '.join(sorted(sequence.needs))}",
                found=f"teacher_index {sequence.teacher_index}, advantage {sequence.advantage}",
            )  # fmt: skip
    if sequence.teacher_index is None:
        return
    covered = 0
    for part in sequence.hidden:
        if part.first_token_row != covered or part.width != sequence.hidden[0].width:
            break
        covered += part.rows
    if covered != sequence.response_tokens:
        raise ContractError(
            where,
            expected=f"hidden states of {sequence.response_tokens} response tokens, one width",
            found=f"rows for the first {covered}",
            safe="tokens and other trajectories",
            next_command="opd repair RUN",
        )


def _hidden_range(row: Mapping[str, Any]) -> HiddenRange:
    if row["dtype"] != "BF16":
        raise ContractError(
            f"hidden_shards, trajectory {row['trajectory_id']}, dtype", expected="BF16", found=str(row["dtype"])
        )
    return HiddenRange(
        row["object_key"], row["first_token_row"], row["first_object_row"], row["rows"], row["width"],
        tuple(row["block_crcs"]),
    )  # fmt: skip
