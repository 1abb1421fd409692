from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import config, keys
from schemas.config import PromptFile, RunConfig
from schemas.errors import ConfigError, FormatError
from tasks import prompts
from tasks.prompt_files import COLUMNS, file_rows, file_source


def prompt_file(path: str | Path, **values: Any) -> PromptFile:
    return PromptFile.model_validate({"path": str(path), **values})


def jsonl(folder: Path, *rows: object, name: str = "own.jsonl") -> PromptFile:
    path = folder / name
    path.write_bytes(b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows))
    return prompt_file(path=path, teachers=("a",))


def run_config(*files: PromptFile, **changes) -> RunConfig:
    values = {"per_iteration": 2, "heldout": 1, "files": [f.model_dump() for f in files]} | changes
    return config.parse(
        {
            "run_id": "t", "student": {"path": "x"}, "prompts": values,
            "teachers": [{"id": "alpha", "path": "x"}, {"id": "a", "path": "y"}],
        }
    )  # fmt: skip


ROWS = [
    {"text": "2+2?", "answer": 4},
    {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}],
        "answer": "Paris", "domain": "facts", "verifier": "m:f", "context": {"b": [1, None], "a": "x"},
        "teachers": ["alpha", {"teacher_id": "a", "weight": 0.5}],
    },
    {"text": "é\u2028\u2029\x85\x0b\U0001f600", "answer": None, "domain": None},
]  # fmt: skip


def expected(file: PromptFile) -> list[dict]:
    share = [{"teacher_id": "a", "weight": 1.0}]
    return [
        {"domain": file.domain, "teachers": share, "answer": "4", "verifier": None, "context": {},
         "messages": [{"role": "user", "content": "2+2?"}]},
        {"domain": "facts", "teachers": [{"teacher_id": "a", "weight": 0.5}, {"teacher_id": "alpha", "weight": 1.0}],
         "answer": "Paris", "verifier": "m:f", "context": {"a": "x", "b": [1, None]}, "messages": ROWS[1]["messages"]},
        {"domain": file.domain, "teachers": share, "answer": None, "verifier": None, "context": {},
         "messages": [{"role": "user", "content": ROWS[2]["text"]}]},
    ]  # fmt: skip


def parsed(file: PromptFile) -> list[dict]:
    rows = file_rows(file, ("a", "alpha"))
    return [r | {"messages": json.loads(r["messages"]), "context": json.loads(r["context"])} for r in rows]


def raw(row: object) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("before", "between", "after"),
    [(b"", b"\n", b""), (b"\xef\xbb\xbf", b"\r\n", b"\r\n"), (b"", b"\n", b"\n\n"), (b"\n", b"\n\n", b" \r\n")],
)
def test_what_is_legal_just_works(tmp_path, before, between, after):
    file = jsonl(tmp_path, before + between.join(map(raw, ROWS)) + after)
    assert parsed(file) == expected(file)


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path):
    share = pa.struct([("teacher_id", pa.string()), ("weight", pa.float64())])
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    rows = [
        {"text": "2+2?", "answer": "4"},
        ROWS[1] | {"teachers": [{"teacher_id": "alpha"}, {"teacher_id": "a", "weight": 0.5}]},
        ROWS[2],
    ]
    schema = pa.schema(
        [("messages", pa.list_(message)), ("text", pa.string()), ("answer", pa.string()), ("domain", pa.string()),
         ("teachers", pa.list_(share)), ("verifier", pa.string()),
         ("context", pa.struct([("a", pa.string()), ("b", pa.list_(pa.int64()))]))]
    )  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "own.parquet")
    file = prompt_file(path=tmp_path / "own.parquet", teachers=("a",))
    assert parsed(file) == expected(file)


def test_the_source_is_of_bytes_and_settings_not_of_names(tmp_path):
    first = jsonl(tmp_path, *ROWS)
    again = prompt_file(path=jsonl(tmp_path, *ROWS, name="copy.jsonl").path, domain="own", teachers=("a",))
    assert file_source(first) == file_source(again)
    assert file_source(first) != file_source(prompt_file(path=first.path, teachers=("alpha",)))
    assert file_source(first) != file_source(jsonl(tmp_path, *ROWS[:2], name="own.jsonl"))


def test_rows_of_the_table_and_repeated_ones(tmp_path):
    file = jsonl(tmp_path, *ROWS, ROWS[0], {"answer": "4", "text": "2+2?"}, ROWS[0] | {"answer": "5"})
    rows, repeated = prompts.read_prompts(run_config(file))
    assert (len(rows), repeated) == (4, 2)
    for row in rows:
        assert row["source"] == file_source(file)
        assert row["prompt_id"] == keys.prompt_id(row)
    assert rows == prompts.load_prompts(run_config(file))


def test_files_and_generated_prompts_mix(tmp_path):
    gym = [{"name": "chain_sum", "size": 3, "teachers": ["a"]}]
    rows = prompts.load_prompts(run_config(jsonl(tmp_path, *ROWS), datasets=gym))
    assert sorted(r["domain"] for r in rows) == ["chain_sum"] * 3 + ["facts", "own", "own"]


TEXT = {"text": "hello"}
BAD_ROWS = [
    (b'{"text": "a"', "line 2", "one JSON object"),
    (b"[1]", "line 2", "a JSON object"),
    (b'{"text": NaN}', "line 2", "no JSON number"),
    (b'{"text": "a", "text": "b"}', "line 2", "stands twice"),
    (b'{"text": "caf\xe9"}', "line 2, byte 14", "UTF-8"),
    (b'\xff\xfe{\x00"\x00', "line 2, byte 1", "UTF-8"),
    (b'{"text": "a\\u0000b"}', "line 2, text", "a NUL"),
    (b'{"text": "a\x00b"}', "line 2", "one JSON object"),
    (b'{"text": "a\\ud800b"}', "line 2, text", "U+D800"),
    (b"[" * 100_000, "line 2", "one JSON object"),
    ({"txt": "a"}, "line 2, column 'txt'", "did you mean 'text'"),
    ({"text": "a", "messages": [{"role": "user", "content": "b"}]}, "line 2", "both"),
    ({"answer": "a"}, "line 2", "neither"),
    ({"text": ""}, "line 2, text", "not empty"),
    ({"text": " \n\t"}, "line 2, text", "not empty"),
    ({"text": 5}, "line 2, text", "5"),
    ({"messages": []}, "line 2, messages", "list"),
    ({"messages": "hello"}, "line 2, messages", "list"),
    ({"messages": ["hello"]}, "messages[0]", "role and content"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "role and content"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0]", "role and content"),
    ({"messages": [{"role": "usr", "content": "a"}]}, "messages[0].role", "did you mean 'user'"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role", "['user']"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0], content", "not empty"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0]", "role and content"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", "student answers"),
    (TEXT | {"answer": True}, "line 2, answer", "True"),
    (TEXT | {"answer": ["a"]}, "line 2, answer", "['a']"),
    (TEXT | {"domain": ""}, "line 2, domain", "not empty"),
    (TEXT | {"context": "{}"}, "line 2, context", "an object"),
    (TEXT | {"context": {"deep": ["\ud834"]}}, "line 2, context, deep", "U+D834"),
    (TEXT | {"context": {"\0": 1}}, "line 2, context", "a NUL"),
    (TEXT | {"verifier": 3}, "line 2, verifier", "3"),
    (TEXT | {"teachers": "a"}, "line 2, teachers", "list"),
    (TEXT | {"teachers": ["a", {"teacher_id": "a"}]}, "line 2, teachers", "again"),
    (TEXT | {"teachers": [{"teacher_id": "a", "weight": 0}]}, "line 2, teachers, a", "above 0"),
    (TEXT | {"teachers": [{"teacher_id": "a", "weight": True}]}, "line 2, teachers, a", "above 0"),
    (TEXT | {"teachers": [{"id": "a"}]}, "line 2, teachers", "teacher_id and weight"),
]


@pytest.mark.parametrize(("row", "where", "says"), BAD_ROWS)
def test_a_bad_row_is_named_with_its_line(tmp_path, row, where, says):
    row = row + b"\n" if isinstance(row, bytes) else row
    with pytest.raises(FormatError) as caught:
        file_rows(jsonl(tmp_path, TEXT, row, TEXT), ("a", "alpha"))
    assert caught.value.where.startswith(str(tmp_path / "own.jsonl"))
    assert where in caught.value.where
    assert says in str(caught.value)


@pytest.mark.parametrize(("teachers", "says"), [(["alhpa"], "did you mean 'alpha'"), ([7], "7"), ([], "none")])
def test_teachers_that_the_run_does_not_have(tmp_path, teachers, says):
    row = TEXT | {"teachers": [{"teacher_id": 7}] if teachers == [7] else teachers}
    with pytest.raises(ConfigError, match="line 1, teachers") as caught:
        file_rows(jsonl(tmp_path, row), ("a", "alpha"))
    assert says in caught.value.found


def test_files_that_are_no_files_of_prompts(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        file_rows(prompt_file(path=tmp_path / "none.jsonl", teachers=("a",)), ("a",))
    os.mkdir(tmp_path / "folder.jsonl")
    with pytest.raises(ConfigError, match="directory"):
        file_rows(prompt_file(path=tmp_path / "folder.jsonl", teachers=("a",)), ("a",))
    with pytest.raises(ConfigError, match=r"\.jsonl or \.parquet"):
        file_rows(jsonl(tmp_path, TEXT, name="own.csv"), ("a",))
    with pytest.raises(FormatError, match="at least one prompt"):
        file_rows(jsonl(tmp_path), ("a",))
    with pytest.raises(FormatError, match="Parquet"):
        file_rows(jsonl(tmp_path, TEXT, name="own.parquet"), ("a",))
    pq.write_table(pa.table({"text": ["a" * 5000]}), tmp_path / "cut.parquet")
    whole = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match="Parquet"):
        file_rows(prompt_file(path=tmp_path / "cut.parquet", teachers=("a",)), ("a",))
    pq.write_table(pa.table({"text": ["a"], "context": [b"bytes"]}), tmp_path / "types.parquet")
    with pytest.raises(FormatError, match="row 1, context"):
        file_rows(prompt_file(path=tmp_path / "types.parquet", teachers=("a",)), ("a",))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=200)
@given(row=st.dictionaries(st.sampled_from([*COLUMNS, "other"]), json_values, max_size=4), tail=st.binary(max_size=20))
def test_any_bytes_give_rows_or_one_error(tmp_path_factory, row, tail):
    folder = tmp_path_factory.mktemp("any")
    refused, rows = "", []
    try:
        rows = file_rows(jsonl(folder, row, tail), ("a",))
    except (ConfigError, FormatError) as error:
        refused = error.where
    assert (str(folder) in refused) is not bool(rows)
    for found in rows:
        keys.canonical_json(found).decode("utf-8")
        assert all(m["content"].strip() for m in json.loads(found["messages"]))
