"""Identity and object keys: digests of content, and the one place where a key is spelt.

    runs/RUN/record/000001.json                         numbered run records
    runs/RUN/lease/...                                  who drives the run
    runs/RUN/00003/rollout/records/000001.json          what the stage is under that record: facts and fingerprint
    runs/RUN/00003/rollout/FINGERPRINT/manifest.json    proof that a stage finished
    .../p00007/epochs/000002.json                       epoch object: a lease, the partition manifest, or its revocation
    .../p00007/heartbeats/000002.json                   counter of the epoch's owner
    .../p00007/e000002/NAME                             objects written by the owner of that epoch

Digests are made of content, never of keys: epochs and keys are observed, they differ between reruns.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.errors import ConfigError

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces; NaN and infinity are refused with ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(
        "utf-8", "surrogatepass"
    )


def digest(value: Any) -> str:
    """SHA-256, in hexadecimal, of a JSON value's canonical form."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def prompt_id(columns: Mapping[str, Any]) -> str:
    """Identity of a prompt: 32 hexadecimal digits over its content: all columns but where it is from."""
    return digest({k: v for k, v in columns.items() if k not in ("prompt_id", "source")})[:32]


def is_prompt_id_of(columns: Mapping[str, Any]) -> bool:
    """Is a row's prompt_id that of its content? In rows of version 0.1 the source was part of it."""
    of_0_1 = digest({k: v for k, v in columns.items() if k != "prompt_id"})[:32]
    return columns["prompt_id"] in (prompt_id(columns), of_0_1)


def trajectory_id(run_id: str, iteration: int, prompt_id: str, sample_index: int) -> str:
    """Identity of one sampled sequence: 32 hexadecimal digits."""
    return digest([run_id, iteration, prompt_id, sample_index])[:32]


def sampling_key(seed: int, trajectory_id: str) -> int:
    """The Philox key of a trajectory: the first 64 bits, big-endian, of SHA-256 over "SEED:TRAJECTORY_ID"."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{trajectory_id}".encode()).digest()[:8], "big")


def seeded_order(seed: int, label: str, ids: Sequence[str]) -> list[str]:
    """A permutation of ids that depends on (seed, label) and the ids alone, not on their order."""
    return sorted(ids, key=lambda i: (hashlib.sha256(f"{seed}:{label}:{i}".encode()).digest(), i))


def check_run_id(run_id: str) -> str:
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError(
            "run_id",
            expected="1-100 letters, digits, '.', '_' or '-', starting with a letter or digit",
            found=repr(run_id),
        )
    return run_id


def run_prefix(run_id: str) -> str:
    return f"runs/{run_id}"


def run_record(run_id: str, number: int) -> str:
    return f"runs/{run_id}/record/{number:06d}.json"


def run_records(run_id: str) -> str:
    return f"runs/{run_id}/record/"


def run_lease(run_id: str) -> str:
    return f"runs/{run_id}/lease"


def stage_prefix(run_id: str, iteration: int, stage: str, fingerprint: str) -> str:
    return f"runs/{run_id}/{iteration:05d}/{stage}/{fingerprint[:16]}"


def stage_identity(run_id: str, iteration: int, stage: str, record: int) -> str:
    """What a stage of an iteration is under a run record: facts and fingerprint, put before anything is made."""
    return f"runs/{run_id}/{iteration:05d}/{stage}/records/{record:06d}.json"


def stage_folder(run_id: str, iteration: int, stage: str) -> str:
    """Folder of a stage's fingerprints, in one iteration."""
    return f"runs/{run_id}/{iteration:05d}/{stage}/"


def revoked(stage_prefix: str) -> str:
    """Which partitions of a finished stage have lost objects and are to be made anew."""
    return f"{stage_prefix}/revoked.json"


def stage_manifest(stage_prefix: str) -> str:
    return f"{stage_prefix}/manifest.json"


def derived_rows(stage_prefix: str, table: str, digest: str) -> str:
    """Rows that a stage's parent derived. digest, of all their columns, keeps two drivers out of each other's way."""
    return f"{stage_prefix}/tables/{table}-{digest[:16]}.jsonl"


def partition_prefix(stage_prefix: str, partition: int) -> str:
    return f"{stage_prefix}/p{partition:05d}"


def epochs(owned: str) -> str:
    """Folder of the epoch objects of anything that is owned through a lease."""
    return f"{owned}/epochs/"


def epoch(owned: str, number: int) -> str:
    return f"{owned}/epochs/{number:06d}.json"


def heartbeat(owned: str, number: int) -> str:
    return f"{owned}/heartbeats/{number:06d}.json"


def owned_object(owned: str, epoch_number: int, name: str) -> str:
    """Key of an object written by the owner of one epoch."""
    return f"{owned}/e{epoch_number:06d}/{name}"


def local_name(owned: str) -> str:
    """Name of a local folder for what is owned: 16 hexadecimal digits."""
    return digest(owned)[:16]


def wal_segment(owned: str, epoch_number: int, segment: int) -> str:
    return owned_object(owned, epoch_number, f"wal/{segment:06d}.seg")


def flow_run(flow_run_id: str) -> str:
    """Which run a scheduled flow run drives: set at its first start, met again by its retries."""
    return f"flow-runs/{flow_run_id}.json"


def run_name(run_id: str) -> str:
    """Which scheduled flow run has taken a run's name."""
    return f"run-names/{run_id}.json"


def promises() -> str:
    """Which promises of the store were tried, once a root; another number when there are more of them."""
    return "promises/000001.json"


#: Keys that our programs put by way of uploads: large objects of partitions, rows of tables, and Spark's own files.
_UPLOADED = re.compile(
    rf"runs/{_RUN_ID.pattern}/[0-9]{{5}}/[a-z]+/[0-9a-f]{{16}}/(p[0-9]{{5}}/e[0-9]{{6}}/.+|tables/[a-z_]+-[0-9a-f]{{16}}\.jsonl)"
    r"|prompts/.+\.jsonl"
    r"|tables/(\.broken|prompts|trajectories|hidden_shards|plan|checkpoints|metrics|stage_runs)/.+"
)


def is_ours(key: str) -> bool:
    """Whether an upload to this key, relative to the root, can be of this software: others may share the bucket."""
    return _UPLOADED.fullmatch(key) is not None


def table_lease(table: str) -> str:
    return f"table-leases/{table}"
