from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import config, keys
from schemas.config import PromptFile, RunConfig
from schemas.config_teachers import OpdTeacher
from schemas.errors import ConfigError, FormatError
from tasks.inputs import prompts
from tasks.inputs.prompt_files import COLUMNS, file_rows, file_source


def prompt_file(path: str | Path, **values: Any) -> PromptFile:
    return PromptFile.model_validate({"path": str(path), **values})


def jsonl(folder: Path, *rows: object, name: str = "own.jsonl") -> PromptFile:
    path = folder / name
    path.write_bytes(b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows))
    return prompt_file(path=path, teachers=("a",))


def run_config(*files: PromptFile, **changes) -> RunConfig:
    values = {"per_iteration": 2, "heldout": 1, "files": [f.model_dump() for f in files], "verifiers": ["m:f"]}
    values |= changes
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
    rows = [{n: v for n, v in row.items() if n != "source"} for row in file_rows(file, ("a", "alpha"), {"m:f"})]
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


def test_the_name_in_the_record_is_of_lines_and_settings_not_of_names(tmp_path):
    first = jsonl(tmp_path, *ROWS)
    again = prompt_file(path=jsonl(tmp_path, *ROWS, name="copy.jsonl").path, domain="own", teachers=("a",))
    assert file_source(first) == file_source(again)
    assert file_source(first) != file_source(prompt_file(path=first.path, teachers=("alpha",)))
    lines = [raw(json.loads(json.dumps(row))) for row in ROWS]
    windows = b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\r\n"
    Path(again.path).write_bytes(b"\n".join(lines) + b"\n")
    assert (
        file_source(again)
        == f"file:{keys.digest([keys.digest_bytes(Path(again.path).read_bytes()), again.content()])[:16]}"
    )
    plain = file_source(again)
    Path(again.path).write_bytes(windows)
    assert file_source(again) == plain
    assert file_source(first) != file_source(jsonl(tmp_path, *ROWS[:2], name="own.jsonl"))


def test_rows_of_the_table_and_repeated_ones(tmp_path):
    file = jsonl(tmp_path, *ROWS, ROWS[0], {"answer": "4", "text": "2+2?"}, ROWS[0] | {"answer": "5"})
    rows, repeated = prompts.read_prompts(run_config(file, heldout=0))
    assert (len(rows), repeated) == (4, {file.path: 2})
    sources = [f"{file.path}, line {number}" for number in (1, 2, 3, 6)]
    assert sorted(row["source"] for row in rows) == sources
    for row in rows:
        assert row["prompt_id"] == keys.prompt_id(row) == keys.prompt_id(row | {"source": "elsewhere"})
    assert rows == prompts.load_prompts(run_config(file, heldout=0))


def test_equal_rows_of_two_files_are_one_prompt(tmp_path):
    """Of whatever name, line ends, order of names in an object, and format."""
    turned = [{name: row[name] for name in reversed(row)} for row in ROWS]
    turned[1] = turned[1] | {"messages": [{"content": m["content"], "role": m["role"]} for m in ROWS[1]["messages"]]}
    windows = [b"\xef\xbb\xbf" + b"".join(raw(row) + b"\r\n" for row in turned)]
    own, other = jsonl(tmp_path, *ROWS), jsonl(tmp_path, *windows, name="other.jsonl")
    table = [{"text": ROWS[0]["text"], "answer": "4"}, {"text": ROWS[2]["text"], "answer": None}]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "third.parquet")
    third = prompt_file(path=tmp_path / "third.parquet", teachers=("a",))
    alone = prompts.load_prompts(run_config(own))
    rows, repeated = prompts.read_prompts(run_config(own, other, third))
    assert rows == alone, "domain and source of the first"
    assert repeated == {other.path: 3, third.path: 2}
    assert {
        r["prompt_id"] for r in prompts.load_prompts(run_config(prompt_file(**other.model_dump() | {"domain": "own"})))
    } == {r["prompt_id"] for r in alone}


def test_held_out_and_training_prompts_never_ask_the_same(tmp_path):
    same = [{"text": f"question {n % 6}", "answer": str(n)} for n in range(24)]
    same += [{"text": f"question {n}", "teachers": ["alpha"]} for n in range(6)]
    run = run_config(jsonl(tmp_path, *same), heldout=2, per_iteration=8)
    train, heldout = prompts.split_prompts(prompts.load_prompts(run), 3, 2)
    assert len(heldout) == 2
    assert not {r["messages"] for r in train} & {r["messages"] for r in heldout}
    assert len(train) >= 20
    with pytest.raises(ConfigError, match="ask what a held-out one asks"):
        prompts.load_prompts(run_config(jsonl(tmp_path, *same), heldout=2, per_iteration=28))


def answers(tmp_path: Path, texts: list[str]) -> list[str | None]:
    lines = [f'{{"text": "q{n}", "answer": {text}}}\n'.encode() for n, text in enumerate(texts)]
    return [row["answer"] for row in file_rows(jsonl(tmp_path, *lines), ("a",))]


def test_numbers_keep_their_text(tmp_path):
    texts = ["42.0", "1e22", "1E+5", "9007199254740993.0", "-0", "0.10", "12345678901234567890123", "1e-400"]
    assert answers(tmp_path, texts) == texts
    row = b'{"text": "q", "context": {"b": [1.50, 1e5], "a": 9007199254740993.0, "c": 9007199254740993}}\n'
    (read,) = file_rows(jsonl(tmp_path, row), ("a",))
    assert read["context"] == '{"a": 9007199254740993.0, "b": [1.50, 1e5], "c": 9007199254740993}'
    for text in ("1e999999999", "-1e400"):
        with pytest.raises(FormatError, match=f"a finite number\nfound: {text}"):
            answers(tmp_path, [text])


def test_numbers_of_parquet_keep_their_text(tmp_path):
    columns = {
        pa.int64(): ([9007199254740993], ["9007199254740993"]), pa.uint64(): ([2**64 - 1], [str(2**64 - 1)]),
        pa.float64(): ([42.0], ["42.0"]), pa.float32(): ([0.1], ["0.1"]),
        pa.decimal128(38, 2): ([Decimal("90071992547409930.10")], ["90071992547409930.10"]),
    }  # fmt: skip
    for number, (kind, (values, texts)) in enumerate(columns.items()):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"text": ["q"], "answer": pa.array(values, kind)}), path)
        assert [r["answer"] for r in file_rows(prompt_file(path=path, teachers=("a",)), ("a",))] == texts


@pytest.mark.parametrize("weight", [b"1e-38", b"1e-46", b"0", b"-1", b"3.5e38", b"1e400", b"9" * 60])
def test_weights_are_numbers_of_fp32(tmp_path, weight):
    row = b'{"text": "q", "teachers": [{"teacher_id": "a", "weight": %s}]}\n' % weight
    with pytest.raises(FormatError, match="line 2, teachers"):
        file_rows(jsonl(tmp_path, TEXT, row), ("a",))


def test_weights_multiply_within_fp32(tmp_path):
    file = jsonl(tmp_path, *({"text": f"q{n}", "teachers": [{"teacher_id": "a", "weight": 1e-30}]} for n in range(4)))
    run = run_config(file)
    light = OpdTeacher.model_validate({"id": "a", "path": "x", "weight": 1e-20})
    with pytest.raises(ConfigError, match=r"line 1, teachers, a(.|\n)*1e-30 x 1e-20"):
        prompts.load_prompts(run.model_copy(update={"teachers": (light,)}))


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


def test_a_row_names_only_verifiers_that_the_configuration_lists(tmp_path, monkeypatch):
    """And nothing that it names is imported: the module would leave a mark."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hostile.py").write_text("from pathlib import Path\nPath('mark').touch()\n")
    for name in ("builtins:eval", "hostile:f", "os:system", "own_rewards:exact "):
        with pytest.raises(ConfigError, match=r"own\.jsonl, line 2, verifier") as caught:
            file_rows(jsonl(tmp_path, TEXT, TEXT | {"verifier": name}), ("a",), {"own_rewards:exact"})
        assert repr(name) in caught.value.found
    assert not (tmp_path / "mark").exists()
    rows = file_rows(jsonl(tmp_path, TEXT | {"verifier": "own_rewards:exact"}), ("a",), {"own_rewards:exact"})
    assert rows[0]["verifier"] == "own_rewards:exact"
