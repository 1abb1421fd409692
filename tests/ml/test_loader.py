"""The shared-memory loader: what it yields, what it refuses, and that it neither leaks nor hangs."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml.train.batches import Phase, layout, schedule
from ml.train.loader import NodeLoader, RankBatches
from ml.train.micro_batch import Segment
from ml.train.objectives.kl import KL
from ml.train.tokens import TokenShards
from schemas import keys, shards
from schemas.errors import ConfigError, ContractError, FormatError, StoreError
from tests.support.training_world import Blobs, World, make_world, plan_rows

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
TOKENS = "rollout/tokens.safetensors"


def small_world(**options) -> World:
    return make_world([(3, 4), (1, 1), (5, 300), (2, 7), (4, 2), (9, 5)], {0: 8, 1: 6}, vocab=50, **options)


def small_plan(world: World) -> list[dict]:
    steps = [
        [[("t000", 0, 1.0), ("t002", 0, 0.5)], [("t001", 0, 1.0), ("t003", 1, 2.0)], [("t000", 1, 1.0)]],
        [[("t004", 0, 1.0)], [("t005", 1, 1.0)]],
    ]
    return plan_rows(world, steps, slots=2) + plan_rows(world, [[[("t005", 0, 1.0)]]], slots=2, split="heldout")


def frames_of(world: World, plan: list[dict], ranks: int, **options):
    return schedule(plan, world.trajectory_rows, world.hidden_rows, ranks=ranks, needs={"kl": KL.needs}, **options)


def phases(plan: list[dict]) -> list[tuple[Phase, int]]:
    steps: list[tuple[Phase, int]] = [("train", s) for s in sorted({r["step"] for r in plan if r["split"] == "train"})]
    return [("before", 0), *steps, ("after", 0)]


def read_all(batches: RankBatches, plan: list[dict]) -> None:
    for phase, step in phases(plan):
        for _ in batches.mini_batch(phase, step):
            continue


def hidden_of(segment: Segment) -> torch.Tensor:
    assert segment.hidden_RE is not None
    return segment.hidden_RE


def walk(tmp_path: Path, world: World, plan: list[dict], ranks: int, loader_bytes: int = 1 << 20) -> list[list[dict]]:
    """Everything that each rank sees, copied out. Ranks are threads here, each with its own mapping."""
    frames = frames_of(world, plan, ranks)
    loader = NodeLoader(frames, world.blobs, ranks=ranks, loader_bytes=loader_bytes, job_id="test", root=tmp_path)
    seen: list[list[dict]] = [[] for _ in range(ranks)]

    def consume(rank: int) -> None:
        batches = RankBatches(loader.folder, frames, rank=rank, ranks=ranks, device=CPU)
        for phase, step in phases(plan):
            for batch in batches.mini_batch(phase, step):
                seen[rank].append(
                    {
                        "phase": phase, "step": step, "frame": batch.frame, "ids": batch.ids_N.tolist(),
                        "positions": batch.positions_N.tolist(), "cu": list(batch.cu_tokens),
                        "segments": [
                            (s.teacher_index, s.rows_R.tolist(), s.response_R.tolist(), s.weight_R.tolist(),
                             s.logged_R.tolist(), hidden_of(s).view(torch.uint16).numpy().copy())
                            for s in batch.segments
                        ],
                    }
                )  # fmt: skip

    threads = [threading.Thread(target=consume, args=(rank,)) for rank in range(ranks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a rank hangs"
    finally:
        loader.close()
    return seen


def check_batch(world: World, batch: dict) -> None:
    """Against the trajectories themselves, token by token."""
    sequences = batch["frame"].sequences
    ids, positions, cu, expected = [], [], [0], {}
    for sequence in sequences:
        t = world.trajectories[sequence.trajectory_id]
        for i, token in enumerate(t.response):
            expected.setdefault(sequence.teacher_index, []).append(
                (len(ids) + len(t.prompt) + i - 1, int(token), sequence.weight * int(t.mask[i]), t.logged[i],
                 t.hidden[sequence.teacher_index][i].tolist())
            )  # fmt: skip
        ids += [*t.prompt.tolist(), *t.response.tolist()]
        positions += range(t.length)
        cu.append(len(ids))
    assert (batch["ids"], batch["positions"], batch["cu"]) == (ids, positions, cu)
    found = {
        teacher: list(zip(rows, response, weight, logged, hidden.tolist(), strict=True))
        for teacher, rows, response, weight, logged, hidden in batch["segments"]
    }
    assert found == expected


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_plan_row_reaches_one_rank_whole(tmp_path, ranks):
    world = small_world()
    plan = small_plan(world)
    seen = walk(tmp_path, world, plan, ranks)
    assert {len(batches) for batches in seen} == {{1: 7, 2: 5, 3: 5}[ranks]}  # waves without a pack are left out
    rows = []
    for rank, batches in enumerate(seen):
        for batch in batches:
            if batch["frame"].sequences:
                check_batch(world, batch)
            else:
                assert (batch["ids"], batch["cu"], batch["segments"]) == ([0], [0, 1], [])
            assert batch["frame"].slot % ranks == rank
            rows += [(batch["phase"], batch["step"], s.trajectory_id, s.teacher_index)
                     for s in batch["frame"].sequences]  # fmt: skip
    train = [("train", r["step"], r["trajectory_id"], r["teacher_index"]) for r in plan if r["split"] == "train"]
    assert sorted(rows) == sorted([*train, ("before", 0, "t005", 0), ("after", 0, "t005", 0)])
    assert list(tmp_path.glob("opd-loader-*-*")) == []


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_plan_fits_the_smallest_ring_and_ends(tmp_path_factory, data):
    count = data.draw(st.integers(1, 7))
    lengths = [(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))) for _ in range(count)]
    world = make_world(lengths, {0: 4, 1: 3}, vocab=9)
    items = [(f"t{i:03d}", t, 1.0) for i in range(count) for t in data.draw(st.sampled_from([(0,), (1,), (0, 1)]))]
    items.sort(key=lambda item: item[1])
    packs, rest = [], items
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        packs, rest = [*packs, rest[:size]], rest[size:]
    plan = plan_rows(world, [packs, packs[::-1]], slots=data.draw(st.integers(1, 4)))
    ranks = data.draw(st.integers(1, 3))
    sizes = [layout(f)[1] if f.sequences else 0 for f in frames_of(world, plan, ranks)]
    smallest = max(sum(sizes[i : i + ranks]) for i in range(0, len(sizes), ranks)) + max(sizes)
    seen = walk(tmp_path_factory.mktemp("ring"), world, plan, ranks, loader_bytes=smallest)
    for batch in (b for batches in seen for b in batches if b["frame"].sequences):
        check_batch(world, batch)


def test_a_budget_below_one_wave_names_the_setting(tmp_path):
    world = small_world()
    with pytest.raises(ConfigError, match=r"train\.loader_bytes"):
        NodeLoader(frames_of(world, small_plan(world), 2), world.blobs, ranks=2, loader_bytes=4096, job_id="x",
                   root=tmp_path)  # fmt: skip
    assert list(tmp_path.glob("opd-loader-*-*")) == []


def test_a_long_trajectory_may_lie_in_several_objects(tmp_path):
    world = small_world()
    whole = next(r for r in world.hidden_rows if (r["trajectory_id"], r["teacher_index"]) == ("t002", 0))
    states = world.trajectories["t002"].hidden[0]
    world.hidden_rows.remove(whole)
    for first, last in ((100, 300), (0, 100)):
        key = f"teach/part-{first}"
        padding = np.zeros((5, 8), np.uint16)
        world.blobs.objects[key] = shards.encode(
            {"hidden": ("BF16", np.concatenate([padding, states[first:last]]))}
        )  # fmt: skip
        world.hidden_rows.append(
            whole
            | {"first_token_row": first, "first_object_row": 5, "rows": last - first, "object_key": key,
               "block_crcs": shards.block_crcs(states[first:last])}
        )  # fmt: skip
    batches = walk(tmp_path, world, small_plan(world), 1)[0]
    assert len([b for b in batches if b["frame"].sequences]) == 7
    for batch in batches:
        check_batch(world, batch)


# --- damage and disagreement


def failure_of(tmp_path: Path, world: World, plan: list[dict]) -> Exception:
    frames = frames_of(world, plan, 1)
    loader = NodeLoader(frames, world.blobs, ranks=1, loader_bytes=1 << 20, job_id="bad", root=tmp_path)
    try:
        batches = RankBatches(loader.folder, frames, rank=0, ranks=1, device=CPU)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller checks the kind
            read_all(batches, plan)
        return caught.value
    finally:
        loader.close()


def test_a_flipped_hidden_byte_is_refused_by_block(tmp_path):
    world = small_world()
    data = bytearray(world.blobs.objects["teach/hidden-0.safetensors"])
    row = next(r for r in world.hidden_rows if (r["trajectory_id"], r["teacher_index"]) == ("t002", 0))
    data[4096 + (row["first_object_row"] + 280) * 16] ^= 1
    world.blobs.objects["teach/hidden-0.safetensors"] = bytes(data)
    error = failure_of(tmp_path, world, small_plan(world))
    assert isinstance(error, FormatError)
    assert "block 1" in str(error)


@pytest.mark.parametrize(
    ("column", "row", "block"),
    [("prompt_ids", 4, 0), ("response_ids", 304, 1), ("logprobs_raw", 5, 0), ("sampled_mask", 304, 1)],
)
def test_a_flipped_token_byte_is_refused_by_column_and_block(tmp_path, column, row, block):
    """Of the first and the last block, in rows of t002 (prompt rows 4..9, response rows 5..305)."""
    world = small_world()
    data = bytearray(world.blobs.objects[TOKENS])
    spec = shards.decode_header(bytes(data), TOKENS)[column]
    data[spec.start + row * spec.row_bytes] ^= 1
    world.blobs.objects[TOKENS] = bytes(data)
    error = failure_of(tmp_path, world, small_plan(world))
    assert isinstance(error, FormatError)
    assert f"{TOKENS}, column {column}, block {block} " in error.where
    assert error.next_command == "opd repair RUN"


def test_no_flipped_byte_of_a_token_shards_header_passes():
    """Anything that it says: lengths, names, places, CRCs. Its padding says nothing, and may hold what it will."""
    world = small_world()
    good = world.blobs.objects[TOKENS]  # 24 prompt rows and 319 response rows
    digest = world.trajectory_rows[0]["shard_digest"]
    said = len(good[: int.from_bytes(good[:8], "little") + 8].rstrip())

    def rows_of(data: bytes) -> list[list]:
        shard = TokenShards(Blobs({TOKENS: data})).open(TOKENS, digest)
        return [column.tolist() for column in shard.read("t", prompt=(0, 24), response=(0, 319)).values()]

    rows, passed = rows_of(good), []
    for place in range(said):
        data = bytearray(good)
        data[place] ^= 1
        try:
            found = rows_of(bytes(data))
        except (FormatError, ContractError):
            continue
        passed.append((place, found == rows))
    assert all(same for _, same in passed)
    # The CRCs of the column that training does not read.
    unread = good.index(b'"crcs.logprobs_sampled":"') + len(b'"crcs.logprobs_sampled":"')
    assert {place for place, _ in passed} <= set(range(unread, unread + 16))


def test_a_shard_without_crcs_is_read_once_whole_and_by_its_digest(tmp_path):
    """Shards of version 0.1."""
    world = small_world()
    columns = shards.decode(world.blobs.objects[TOKENS], TOKENS)
    dtypes = {name: spec.dtype for name, spec in shards.decode_header(world.blobs.objects[TOKENS], TOKENS).items()}
    old = shards.encode({name: (dtypes[name], rows) for name, rows in columns.items()})
    world.blobs = Counting(world.blobs.objects | {TOKENS: old})
    for row in world.trajectory_rows:
        row["shard_digest"] = keys.digest_bytes(old)
    batches = walk(tmp_path, world, small_plan(world), 1)[0]
    for batch in batches:
        check_batch(world, batch)
    assert world.blobs.whole == [TOKENS]
    world.blobs.objects[TOKENS] = old[:-1] + bytes([old[-1] ^ 1])
    error = failure_of(tmp_path, world, small_plan(world))
    assert isinstance(error, FormatError)
    assert (error.where, error.next_command) == (TOKENS, "opd repair RUN")
    assert "SHA-256" in error.expected


class Counting(Blobs):
    """Also counts: keys read whole, ranges read."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.whole: list[str] = []
        self.ranges: list[tuple[str, int, int]] = []

    def get(self, key: str) -> bytes:
        self.whole.append(key)
        return super().get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.ranges.append((key, start, length))
        return super().get_range(key, start, length)


def test_bytes_read_of_token_shards_follow_the_rows_that_are_needed(tmp_path):
    """Shards of 24 long trajectories in shuffled order, two teachers: a shard is far more than one sequence needs."""
    parts = [make_world([(300, 3000)] * 24, {0: 1, 1: 1}, vocab=1000, seed=seed) for seed in range(4)]
    blobs = Counting({})
    world = World(blobs, {}, [], [])
    for number, part in enumerate(parts):
        name = f"{number}/".__add__
        blobs.objects |= {name(key): data for key, data in part.blobs.objects.items()}
        world.trajectories |= {name(i): t for i, t in part.trajectories.items()}
        world.trajectory_rows += [
            row | {"trajectory_id": name(row["trajectory_id"]), "shard_key": name(row["shard_key"])}
            for row in part.trajectory_rows
        ]
        world.hidden_rows += [
            row | {"trajectory_id": name(row["trajectory_id"]), "object_key": name(row["object_key"])}
            for row in part.hidden_rows
        ]
    order = list(world.trajectories)
    random.Random(0).shuffle(order)
    plan = plan_rows(world, [[[(i, t, 1.0)] for i in order] for t in (0, 1)], slots=2)
    for batch in walk(tmp_path, world, plan, 1)[0][::8]:
        check_batch(world, batch)
    ranges = [r for r in blobs.ranges if r[0].endswith("/tokens.safetensors")]
    heads = [r for r in ranges if r[1] < int.from_bytes(blobs.objects[r[0]][:8], "little") + 8]
    assert blobs.whole == []
    assert len({key for key, _, _ in heads}) == 4
    assert len(heads) == len(set(heads)), "a header was read twice"
    sequences = 2 * len(order)
    needed = sequences * (300 * 4 + 3000 * (4 + 4 + 1))
    edges = sequences * 2 * 255 * (4 + 4 + 4 + 1)
    read = sum(length for _, _, length in ranges)
    assert read <= 1.1 * (needed + edges) + sum(length for _, _, length in heads)
    assert read <= 1.15 * needed, "more than the rows, half a block at each of their ends, and four headers"
    assert len(ranges) <= len(heads) + 4 * sequences


def test_a_cut_hidden_object_is_refused(tmp_path):
    world = small_world()
    world.blobs.objects["teach/hidden-1.safetensors"] = world.blobs.objects["teach/hidden-1.safetensors"][:-10]
    assert isinstance(failure_of(tmp_path, world, small_plan(world)), FormatError)


def test_a_store_that_fails_reaches_the_rank_as_itself(tmp_path):
    world = small_world()

    class Dead(Blobs):
        def get_range(self, key, start, length):
            raise StoreError(key, expected="an answer", found="none", next_command="check the endpoint")

    world.blobs = Dead(world.blobs.objects)
    error = failure_of(tmp_path, world, small_plan(world))
    assert isinstance(error, StoreError)
    assert error.next_command == "check the endpoint"


def test_a_bug_in_the_fetcher_is_no_silence(tmp_path):
    world = small_world()

    class Broken(Blobs):
        def get_range(self, key, start, length):
            raise ZeroDivisionError("oops")

    world.blobs = Broken(world.blobs.objects)
    assert "ZeroDivisionError: oops" in str(failure_of(tmp_path, world, small_plan(world)))


def bad_rows(world: World, kind: str) -> None:
    if kind == "no hidden states":
        world.hidden_rows[:] = [r for r in world.hidden_rows if r["trajectory_id"] != "t003"]
    elif kind == "hidden states too short":
        world.hidden_rows[0]["rows"] -= 1
    elif kind == "no trajectory":
        world.trajectory_rows.pop(0)
    elif kind == "another dtype":
        world.hidden_rows[0]["dtype"] = "F32"
    else:
        world.trajectory_rows[0]["response_tokens"] += 1


@pytest.mark.parametrize(
    "kind", ["no hidden states", "hidden states too short", "no trajectory", "another dtype", "another length"]
)
def test_rows_that_disagree_are_refused_before_anything_is_read(kind):
    world = small_world()
    plan = small_plan(world)
    bad_rows(world, kind)
    with pytest.raises(ContractError, match=r"t00[03]"):
        frames_of(world, plan, 1)


def test_two_denominators_of_one_step_are_refused():
    world = small_world()
    plan = small_plan(world)
    plan[0]["denominator_tokens"] += 1
    with pytest.raises(ContractError, match="denominator"):
        frames_of(world, plan, 1)


def test_continuing_a_plan_leaves_out_what_was_done():
    world = small_world()
    frames = frames_of(world, small_plan(world), 1, first_step=1)
    assert {(f.phase, f.step) for f in frames} == {("train", 1), ("after", 0)}
