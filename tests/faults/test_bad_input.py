"""The table of bad input, first half: what a user gives a new run. Each case ends in one clear error of its kind.

`make bad-input` prints the table. Every case is the command as a user runs it, in this process.
"""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from schemas.errors import ConfigError, ContractError, FormatError, StageError, StoreError
from tests.faults.bad_input import Site, answered, assert_goes_on, case, cure, cut
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.spark]


def sharded(site: Site) -> None:
    """The student's weights as an index and one shard, which is not there."""
    weights = site.folder / "student" / "model.safetensors"
    names = dict.fromkeys(load_file(weights), "model-00001-of-00001.safetensors")
    (site.folder / "student/model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    weights.unlink()


CONFIGURATION = [
    case("no such configuration file", ConfigError, ("other.toml", "no such file"),
         lambda s: setattr(s, "command", ["rollout", "other.toml", "--iteration", "0"])),
    case("configuration is a folder", ConfigError, ("student", "readable TOML"),
         lambda s: setattr(s, "command", ["rollout", "student", "--iteration", "0"])),
    case("configuration is no TOML", ConfigError, "TOML", lambda s: s.config("seed = 3", "seed = = 3")),
    case("configuration is not UTF-8", ConfigError, "UTF-8",
         lambda s: (s.folder / "run.toml").write_bytes(b"run_id = '\xe9'")),
    case("unknown key", ConfigError, "did you mean 'page_tokens'",
         lambda s: s.config("page_tokens", "page_tokns")),
    case("wrong type", ConfigError, "train.learning_rate", lambda s: s.set("train.learning_rate=fast")),
    case("responses of no token", ConfigError, ("rollout.max_response_tokens", "greater than 0"),
         lambda s: s.set("rollout.max_response_tokens=0")),
    case("pages that are no power of two", ConfigError, ("rollout.page_tokens", "found: 48"),
         lambda s: s.set("rollout.page_tokens=48")),
    case("FP8 for weights that it rounds", ConfigError, ("train.compute", "mxfp4", "found: 'fp8' with"),
         lambda s: s.set("train.compute=fp8")),
    case("temperature that fp32 does not hold", ConfigError, ("rollout.temperature", "1e-30"),
         lambda s: s.set("rollout.temperature=1e-39")),
    case("more training ranks than slots", ConfigError, ("train.ranks", "dispatch.slots = 3", "found: 3"),
         lambda s: s.set("train.ranks=3")),
    case("responses that fill a pack", ConfigError, ("dispatch.pack_tokens", "found: 256"),
         lambda s: s.set("rollout.max_response_tokens=256")),
    case("responses that fill a context", ConfigError, ("rollout.max_response_tokens", "512 positions", "found: 512"),
         lambda s: s.set("rollout.max_response_tokens=512", "dispatch.pack_tokens=4096")),
    case("loader smaller than its packs", ConfigError, ("train.loader_bytes", "second", "found: 50000"),
         lambda s: s.set("train.loader_bytes=50000")),
    case("ranks that cannot share the student", ConfigError, ("rollout.tensor_parallel", "2 KV heads", "found: 3"),
         lambda s: s.set("rollout.tensor_parallel=3")),
    case("override without a value", ConfigError, "SECTION.KEY=VALUE", lambda s: s.set("train.learning_rate")),
    case("run_id that leaves its folder", ConfigError, "run_id", lambda s: s.set("run_id=../other")),
    case("iteration out of range", ConfigError, "0 to 0", lambda s: s.command.__setitem__(-1, "7")),
    case("no source of prompts", ConfigError, "datasets and files", lambda s: s.set("prompts.files=[]")),
    case("data set's unknown teacher", ConfigError, "did you mean 'second'",
         lambda s: s.set('prompts.datasets=[{name="chain_sum",size=9,teachers=["secnd"]}]')),
    case("unknown data set", ConfigError, "chain_sums",
         lambda s: s.set('prompts.datasets=[{name="chain_sums",size=9,teachers=["second"]}]')),
    case("root of no known kind", ConfigError, "s3://BUCKET/PREFIX", lambda s: s.set("data=gs://bucket/x")),
    case("cache smaller than one sequence", ConfigError, "rollout.kv_bytes",
         lambda s: s.set("rollout.kv_bytes=100")),
    case("teacher's template is no Jinja", ConfigError, "hinted", lambda s: s.config("{{ answer }}", "{{ answer")),
    case("teacher's template names no column", ConfigError, "'answr' is undefined",
         lambda s: s.config("{{ answer }}", "{{ answr }}")),
    case("teacher's template prints a missing answer", ConfigError, ("teachers, hinted, template", "answer is null"),
         lambda s: (s.prompts({"text": "a"}), s.set("prompts.per_iteration=2"))),
    case("teacher's template divides by zero", ConfigError, ("teachers, hinted, template", "ZeroDivisionError"),
         lambda s: s.config("{{ answer }}", "{{ 1 // 0 }}")),
]  # fmt: skip

MODELS = [
    case("no such model folder", ConfigError, "no such folder", lambda s: s.set("student.path=nowhere")),
    case("folder without weights", ConfigError, "neither",
         lambda s: (s.folder / "student/model.safetensors").unlink()),
    case("folder without tokenizer", ConfigError, "tokenizer.json",
         lambda s: (s.folder / "second/tokenizer.json").unlink()),
    case("no chat template", ConfigError, "chat template",
         lambda s: s.edit("student/tokenizer_config.json", chat_template=None)),
    case("chat template that refuses a prompt", ConfigError, ("chat template", "prompt ", "no systems"),
         lambda s: (s.edit("second/tokenizer_config.json", chat_template="{{ raise_exception('no systems') }}"), None)),
    case("weights cut short", FormatError, "model.safetensors",
         lambda s: cut(s.folder / "student/model.safetensors")),
    case("shard of the weights missing", FormatError, "model-00001-of-00001.safetensors", sharded),
    case("config.json is no JSON", FormatError, "config.json",
         lambda s: (s.folder / "second/config.json").write_text("{")),
    case("tokenizer is no tokenizer", FormatError, "tokenizer.json",
         lambda s: (s.folder / "student/tokenizer.json").write_text("{}")),
    case("config.json without a context length", ConfigError, "max_position_embeddings",
         lambda s: s.edit("second/config.json", max_position_embeddings=None)),
    case("teacher of another vocabulary", ContractError, ("teacher second", "the student's"),
         lambda s: s.config('path = "second"', 'path = "foreign"')),
    case("teacher's head cut below the vocabulary", ContractError, "a row for each of 259 tokens",
         lambda s: (s.tensors("second/model.safetensors",
                              lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:200].clone()})),
                    s.edit("second/config.json", vocab_size=200))),
    case("NaN in the weights", FormatError, ("model.norm.weight", "NaN"),
         lambda s: (s.tensors("student/model.safetensors", lambda t: t["model.norm.weight"].fill_(float("nan"))),None)),
    case("teacher of an unknown architecture", ConfigError, ("second/config.json", "'gpt2'"),
         lambda s: s.edit("second/config.json", model_type="gpt2")),
    case("width that FP8 does not multiply", ConfigError, ("train.objective.precision", "width 40 of teachers, second"),
         lambda s: (tiny_model(s.folder / "second", width=40), s.set("train.objective.precision=fp8"))),
    case("unknown architecture", ConfigError, "'gpt2'",
         lambda s: (s.edit("student/config.json", model_type="gpt2"),None)),
]  # fmt: skip

OWN_PROMPTS = [
    case("no such prompt file", ConfigError, "none.jsonl", lambda s: s.config("own.jsonl", "none.jsonl")),
    case("prompt file of another kind", ConfigError, ".jsonl or .parquet", lambda s: s.config("own.jsonl", "run.toml")),
    case("prompts are not UTF-8", FormatError, ("own.jsonl, line 6", "UTF-8"),
         lambda s: s.prompts(b'{"text": "caf\xe9"}')),
    case("prompts in UTF-16", FormatError, ("own.jsonl, line 1", "UTF-8"),
         lambda s: (s.folder / "own.jsonl").write_text('{"text": "a"}', "utf-16")),
    case("prompts are no JSON", FormatError, "line 6", lambda s: s.prompts(b'{"text": "a"')),
    case("lone surrogate", FormatError, ("line 6", "U+DC00"), lambda s: s.prompts({"text": "a\udc00"})),
    case("NUL", FormatError, ("line 6", "a NUL"), lambda s: s.prompts({"text": "a\0b"})),
    case("empty text", FormatError, "line 6, text", lambda s: s.prompts({"text": " "})),
    case("messages and text", FormatError, ("line 6", "both"),
         lambda s: s.prompts({"text": "a", "messages": [{"role": "user", "content": "a"}]})),
    case("unknown column", FormatError, ("line 6, column 'anwser'", "did you mean 'answer'"),
         lambda s: s.prompts({"text": "a", "anwser": "b"})),
    case("unknown role", FormatError, "did you mean 'user'",
         lambda s: s.prompts({"messages": [{"role": "users", "content": "a"}]})),
    case("row's unknown teacher", ConfigError, ("line 6", "did you mean 'second'"),
         lambda s: s.prompts({"text": "a", "teachers": ["scond"]})),
    case("row's weight that fp32 does not hold", FormatError, ("line 6, teachers, second", "fp32"),
         lambda s: s.prompts({"text": "a", "teachers": [{"teacher_id": "second", "weight": 1e-39}]})),
    case("row without a teacher", ConfigError, "at least one",
         lambda s: s.config('teachers = ["hinted", "second"]', "teachers = []")),
    case("Parquet file cut short", FormatError, "own.parquet",
         lambda s: (pq.write_table(pa.table({"text": ["a" * 900] * 9}), s.folder / "own.parquet"),
                    cut(s.folder / "own.parquet"), s.config("own.jsonl", "own.parquet"))),
    case("fewer prompts than an iteration takes", ConfigError, ("at least 12", "found: 4"),
         lambda s: s.set("prompts.per_iteration=11")),
    case("prompt longer than the student's context", ContractError, ("the student's context", "511 tokens"),
         lambda s: (s.prompts({"text": "x" * 600}), s.set("prompts.per_iteration=4", "dispatch.pack_tokens=4096"))),
    case("prompt longer than its teacher's context", ContractError, "teacher second's context",
         lambda s: (s.edit("second/config.json", max_position_embeddings=20), None)),
    case("prompt longer than a pack", ContractError, ("dispatch.pack_tokens", "rollout.max_response_tokens"),
         lambda s: (s.prompts({"text": "x" * 300}), s.set("prompts.per_iteration=4"))),
    case("no such verifier", ConfigError, "no_such_module",
         lambda s: (s.prompts({"text": "a", "verifier": "no_such_module:f"}),
                    s.set("prompts.per_iteration=4",
                          'prompts.verifiers=["no_such_module:f", "tests.support.verifiers:as_told"]'))),
    case("verifier that only a row names", ConfigError, ("own.jsonl", "line 6", "builtins:eval"),
         lambda s: (s.prompts({"text": "a", "verifier": "builtins:eval"}))),
    case("verifier that cannot be imported", ConfigError, "broken on import",
         lambda s: (s.prompts({"text": "a", "answer": 1, "verifier": "tests.support.broken_verifier:f"}),
                    s.set('prompts.verifiers=["tests.support.broken_verifier:f", "tests.support.verifiers:as_told"]'))),
    case("verifier that raises", StageError,
         ("tests.support.verifiers:as_told", "no such answer", "max_verifier_failures"),
         lambda s: (s.patch.setenv("OPD_TEST_VERIFIER", "fails"))),
    case("verifier that never returns", StageError, "no answer in 0.2 s",
         lambda s: (s.patch.setenv("OPD_TEST_VERIFIER", "never_leaves_c"), s.set(
                    "prompts.verifier_timeout_seconds=0.2"))),
    case("verifier that ends its process", StageError, "status 7",
         lambda s: (s.patch.setenv("OPD_TEST_VERIFIER", "exits"))),
]  # fmt: skip

AROUND = [
    case("data root is a file", StoreError, "data",
         lambda s: (shutil.rmtree(s.folder / "data"), (s.folder / "data").write_text("not a folder"))),
    case("scratch is a file", StoreError, "scratch",
         lambda s: (shutil.rmtree(s.folder / "scratch"), (s.folder / "scratch").write_text("not a folder"),None)),
    case("no S3 credentials", StoreError, "AWS_ACCESS_KEY_ID",
         lambda s: (s.set("data=s3://bucket/x"), s.patch.setenv("AWS_EC2_METADATA_DISABLED", "true"),
                    s.patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9"), s.patch.setenv("HOME", str(s.folder)))),
    case("unreachable S3 endpoint", StoreError, "http://127.0.0.1:9",
         lambda s: (s.set("data=s3://bucket/x"), s.patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
                    s.patch.setenv("AWS_ACCESS_KEY_ID", "a"), s.patch.setenv("AWS_SECRET_ACCESS_KEY", "b"),
                    s.patch.setenv("AWS_REGION", "us-east-1"))),
    case("stage before its inputs", StageError, "opd rollout CONFIG --iteration 0",
         lambda s: s.command.__setitem__(0, "dispatch")),
    case("unknown run", ContractError, ("run other", "bad"),
         lambda s: setattr(s, "command", ["verify", "other"])),
    case("texts of an unknown run", ContractError, ("run other", "bad"),
         lambda s: setattr(s, "command", ["show", "other"])),
]  # fmt: skip


@pytest.mark.parametrize("bad", CONFIGURATION + MODELS + OWN_PROMPTS + AROUND)
def test_bad_input_of_a_new_run_has_one_clear_answer_and_the_cured_run_goes_on(site, stopped, bad, capfd):
    site.set("run_id=new")
    answered(site, bad, capfd)
    cure(site, stopped[0])
    assert_goes_on(site, "new")
