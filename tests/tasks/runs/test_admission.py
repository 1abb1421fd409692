"""Which start of a run is one: records, what `--from-iteration` accepts, settings that older records do not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.store_local import LocalStore
from schemas import config, keys
from schemas.errors import ConfigError, ContractError
from tasks.runs import admission, records
from tasks.runs.finished import STAGES
from tasks.runs.session import Session
from tests.support.fake_spark import FakeSpark
from tests.support.tiny import tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "student")
    return folder


class Site:
    """A run's configuration, whose values a test changes, and its store."""

    def __init__(self, folder: Path, models: Path) -> None:
        (folder / "own.jsonl").write_text('{"text": "q", "answer": 1, "verifier": "own_rewards:one"}\n')
        self.values: dict[str, Any] = {
            "run_id": "r", "iterations": 3, "data": str(folder / "data"), "scratch": str(folder / "scratch"),
            "student": {"path": str(models / "student")}, "teachers": [{"id": "a", "path": str(models / "student")}],
            "prompts": {"per_iteration": 1, "heldout": 0, "files": [
                {"path": str(folder / "own.jsonl"), "teachers": ["a"], "verifier": "own_rewards:one"}]},
            "train": {},
        }  # fmt: skip
        self.store = LocalStore(folder / "data")
        self.session: Session | None = None

    def admit(self, from_iteration: int | None = None) -> records.History:
        run = config.parse(self.values)
        self.session = Session(run, self.store, FakeSpark())  # type: ignore[arg-type]
        return admission.admit(self.session, from_iteration)

    def finish(self, iteration: int, record: int = 1) -> None:
        """As if training, and so all before it, had finished."""
        for stage in STAGES:
            mark = keys.digest([stage, iteration, record])
            identity = {"fingerprint": mark, "facts": {"config": {}, "inputs": {}, "scoring": {}, "given": ""}}
            place = keys.stage_identity("r", iteration, stage, record)
            self.store.put_if_absent(place, keys.canonical_json(identity))
            stats = {"checkpoint": {"version": "v", "export": [], "optimizer": []}} if stage == "train" else {}
            manifest = {"stage": stage, "iteration": iteration, "fingerprint": mark, "inputs": {}, "partitions": {},
                        "tables": {}, "stats": stats, "output_digest": "o", "scoring": {}}  # fmt: skip
            prefix = keys.stage_prefix("r", iteration, stage, mark)
            self.store.put(keys.stage_manifest(prefix), keys.canonical_json(manifest))

    def edit_record(self, number: int, change) -> None:
        key = keys.run_record("r", number)
        record = json.loads(self.store.get(key))
        change(record)
        self.store.put(key, keys.canonical_json(record))


@pytest.fixture
def site(tmp_path, models, monkeypatch) -> Site:
    (tmp_path / "own_rewards.py").write_text("def one(text, prompt): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    return Site(tmp_path, models)


def test_the_first_start_writes_a_record_and_the_next_finds_it(site):
    history = site.admit()
    assert [n for n, _ in history.records] == [1]
    assert site.admit() == history
    assert len(site.store.list(keys.run_records("r"))) == 1


def test_a_changed_setting_is_refused_by_name_once_something_stands(site):
    site.admit()
    site.values["train"]["learning_rate"] = 1e-3
    assert [n for n, _ in site.admit().records] == [1, 2], "nothing stands on the first record"
    site.finish(0, record=2)
    site.values["train"]["learning_rate"] = 1e-2
    with pytest.raises(ContractError) as raised:
        site.admit()
    assert "config.train.learning_rate: 0.001 -> 0.01" in raised.value.found
    assert "--from-iteration" in raised.value.next_command


def test_from_iteration_is_kept_in_the_record_and_leaves_what_lies_below(site):
    site.admit()
    site.finish(0)
    site.finish(1)
    site.values["train"]["learning_rate"] = 1e-3
    history = site.admit(1)
    assert [history.in_force(i) for i in range(3)] == [1, 2, 2]
    assert history.newest[1].from_iteration == 1
    assert site.admit(1) == history, "the same command again goes on"
    assert site.admit() == history
    site.finish(1, record=2)
    site.values["train"]["learning_rate"] = 1e-4
    later = site.admit(2)
    assert [later.in_force(i) for i in range(3)] == [1, 2, 3]
    site.values["train"]["learning_rate"] = 1e-5
    assert [site.admit(0).in_force(i) for i in range(3)] == [4, 4, 4]


def test_what_lies_below_must_be_finished(site):
    site.admit()
    site.finish(0)
    site.values["train"]["learning_rate"] = 1e-3
    with pytest.raises(ContractError, match="iteration 1 is not"):
        site.admit(2)
    with pytest.raises(ConfigError, match="0 to 3"):
        site.admit(4)
    assert len(site.store.list(keys.run_records("r"))) == 1


def test_a_cured_verifier_is_accepted_by_from_iteration_and_the_same_one_is_no_new_record(site, tmp_path):
    site.admit()
    site.finish(0)
    assert [n for n, _ in site.admit(0).records] == [1]
    assert "nothing differs" in str(site.session.notes)
    (tmp_path / "own_rewards.py").write_text("def one(text, prompt): return 2.0\n")
    assert [n for n, _ in site.admit().records] == [1], "a verifier may be cured"
    assert [n for n, _ in site.admit(0).records] == [1, 2]
    assert [n for n, _ in site.admit(0).records] == [1, 2]


def test_a_setting_that_the_record_does_not_know_is_no_change_at_its_default(site):
    """A record of the version before, which had neither rollout.top_k nor a section train."""
    site.admit()
    site.finish(0)

    def older(record: dict[str, Any]) -> None:
        del record["config"]["rollout"]["top_k"]
        del record["config"]["train"]
        del record["config"]["teachers"][0]["weight"]
        del record["config"]["teachers"][0]["kind"]  # of the time when there was one kind

    site.edit_record(1, older)
    site.admit()
    session = site.session
    assert session is not None
    session.history = records.read_history(site.store, "r")
    assert "top_k" not in session.content["rollout"]
    assert "train" not in session.content
    assert not {"weight", "kind"} & session.content["teachers"][0].keys()
    site.values["rollout"] = {"top_k": 5}
    with pytest.raises(ContractError, match="top_k: None -> 5"):
        site.admit()
    history = site.admit(1)
    assert history.newest[1].config["rollout"]["top_k"] == 5
    assert "train" not in history.newest[1].config, "what did not change keeps its fingerprint"


def test_another_kind_of_teacher_is_a_change(site):
    site.admit()
    site.finish(0)
    site.values["teachers"][0]["kind"] = "opd"
    site.admit()
    site.values["teachers"][0]["kind"] = "transformers"
    with pytest.raises(ContractError, match="'kind': 'transformers'") as raised:
        site.admit()
    assert "models.teacher:a" in raised.value.found


def test_a_record_of_before_objectives_goes_on_in_its_own_words(site):
    site.admit()
    site.finish(0)

    def older(record: dict[str, Any]) -> None:
        train = record["config"]["train"]
        del train["objective"]
        train |= {"divergence": "reverse", "temperature": 1.0}  # older still: without kl_precision

    site.edit_record(1, older)
    old = site.admit().newest[1].config["train"]
    session = site.session
    assert session is not None
    session.history = records.read_history(site.store, "r")
    assert session.content["train"] == old, "the fingerprint of training stays"
    site.values["train"] = {"divergence": "reverse"}
    site.admit()
    for values in ({"kl_precision": "fp8"}, {"objective": {"precision": "fp8"}}):
        site.values["train"] = values
        with pytest.raises(ContractError, match=r"config\.train\.kl_precision: None -> 'fp8'"):
            site.admit()
    assert "objective" not in site.admit(1).newest[1].config["train"]


def test_a_record_that_another_has_just_written_is_not_taken_for_ours(site, monkeypatch):
    site.admit()
    site.finish(0)
    site.values["train"]["learning_rate"] = 1e-3
    put = LocalStore.put_if_absent

    def late(store: LocalStore, key: str, data: bytes, **options: Any) -> bool:
        if key == keys.run_record("r", 2):
            put(store, key, keys.canonical_json(json.loads(data) | {"from_iteration": 0}))
        return put(store, key, data, **options)

    monkeypatch.setattr(LocalStore, "put_if_absent", late)
    with pytest.raises(ContractError, match="that of another"):
        site.admit(1)


def test_a_run_of_version_0_1_goes_on_from_its_first_unfinished_iteration(site):
    site.admit()
    site.finish(0)

    def as_0_1(record: dict[str, Any]) -> None:
        for name in ("format", "from_iteration", "made_with"):
            del record[name]
        run = config.parse(site.values)
        digest = admission.weights_digest_of_0_1(Path(run.student.path))
        record["models"] = {"student": digest, "teacher:a": digest}

    site.edit_record(1, as_0_1)
    for key in site.store.list("runs/r/00000"):
        if "/records/" in key:
            site.store.delete(key)
    history = site.admit()
    assert [history.in_force(i) for i in range(3)] == [1, 2, 2]
    assert history.newest[1].from_iteration == 1
    assert site.admit() == history
    site.edit_record(1, lambda record: record["models"].update(student="0" * 64))
    site.store.delete(keys.run_record("r", 2))
    with pytest.raises(ContractError, match=r"models\.student"):
        site.admit()
