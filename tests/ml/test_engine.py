"""The rollout engine against transformers, and its promise: nothing but prompt, key and weights decides the bits."""

from __future__ import annotations

import math
import random
import struct
import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from ml.checkpoint import load_model
from ml.model import SPLIT_TOKENS, SampledCausal, Transformer
from ml.rollout.engine import EngineConfig, Finished, Request, RolloutEngine
from ml.rollout.runner import Runner
from ml.rollout.sampling import SamplingParams
from ml.rollout.scheduler import Scheduler, Sequence
from ml.rollout.spill import decode_kv
from ml.rollout.wal import LogHeader, TokenLog
from ml.rollout.wal_recovery import read_folder, recover
from schemas.errors import ContractError

VOCABULARY, ROWS = 61, 64
STOP = (7, 8)
KINDS = ("llama", "qwen2", "qwen3")


@cache
def models(kind: str) -> tuple[Any, Transformer, Transformer]:
    """(transformers' own in fp32, ours in fp32, ours in bf16) of one tiny random checkpoint."""
    import transformers

    sizes = {
        "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160,
        "initializer_range": 0.2, "tie_word_embeddings": kind == "llama",
    }  # fmt: skip
    if kind == "qwen3":
        sizes["head_dim"] = 16
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    torch.manual_seed(5)
    theirs = model_class(config_class(**sizes)).eval()
    for parameter in theirs.parameters():
        if parameter.ndim == 1:  # biases and norms start as constants
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_model(Path(folder), precision="fp32", compute="fp32")
        small = load_model(Path(folder), precision="bf16", compute="bf16")
    return theirs, ours, small


@dataclass
class MemoryLog:
    """A log that is durable when told so, or at once."""

    immediate: bool = True
    acknowledged: int = 0
    sequence: int = 0
    committed: int = 0
    names: list[str] = field(default_factory=list)
    tokens: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    finishes: dict[str, tuple[int, str]] = field(default_factory=dict)

    def admit(self, trajectory_id: str, *, prompt_digest: bytes, prompt_tokens: int) -> int:
        assert len(prompt_digest) == 32
        self.names.append(trajectory_id)
        return len(self.names) - 1

    def append_step(self, entries) -> int:
        for number, first, ids, raw, sampled in entries:
            column = self.tokens.setdefault(self.names[number], [])
            column.extend(zip(ids, raw, sampled, strict=True))
            assert first + len(ids) >= len(column)
        return self._next()

    def append_finish(self, number: int, response_tokens: int, reason: str) -> int:
        self.finishes[self.names[number]] = (response_tokens, reason)
        return self._next()

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    def commit(self) -> None:
        self.committed = self.sequence
        if self.immediate:
            self.acknowledged = self.sequence

    def wait_local(self, sequence: int) -> None:
        assert sequence <= self.committed
        self.acknowledged = self.committed


CONFIG = EngineConfig(8, page_tokens=8, num_pages=80, prefill_chunk_tokens=24, split_tokens=16, student_digest="s")
PLAIN = SamplingParams()


def engine(model: Transformer, config=CONFIG, sampling=PLAIN, log: Any = None, stop_ids=STOP) -> RolloutEngine:
    return RolloutEngine(model, config, sampling, stop_ids, VOCABULARY, log or MemoryLog())


def requests(count: int, seed: int = 0) -> list[Request]:
    r = random.Random(seed)
    lengths = [1, 2, 8, 16, 17, 40, *(r.randint(1, 50) for _ in range(count))][:count]
    return [
        Request(f"t{i}", tuple(r.randrange(VOCABULARY) for _ in range(n)), r.getrandbits(64), r.choice([1, 5, 30, 60]))
        for i, n in enumerate(lengths)
    ]


def run(one: RolloutEngine) -> dict[str, Finished]:
    out: list[Finished] = []
    while one.has_work():
        out += one.step()
    assert len({f.trajectory_id for f in out}) == len(out)
    return {f.trajectory_id: f for f in out}


def bits(finished: Finished) -> tuple:
    logprobs = (*finished.logprobs_raw, *finished.logprobs_sampled)
    return (
        finished.trajectory_id,
        finished.response_ids,
        struct.pack(f"{len(logprobs)}d", *logprobs),
        finished.finish_reason,
    )


def alone(model: Transformer, request: Request, sampling=PLAIN) -> tuple:
    one = engine(model, sampling=sampling)
    one.add(request)
    return bits(run(one)[request.trajectory_id])


# --- values: transformers is the oracle


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_chunks_and_single_steps_equal_transformers(kind):
    theirs, ours, _ = models(kind)
    r = random.Random(1)
    tokens = [[r.randrange(VOCABULARY) for _ in range(n)] for n in (50, 1, 16, 23)]
    scheduler = Scheduler(max_sequences=8, page_tokens=8, num_pages=40, prefill_tokens=19)
    runner = Runner(ours, num_pages=40, page_tokens=8, split_tokens=16, vocab_size=VOCABULARY)
    # Sequence i is given 3 tokens at first; the rest arrive one by one, so most positions are single steps.
    live = [Sequence(str(i), t[: 1 + len(t) // 2], 1, 99) for i, t in enumerate(tokens)]
    for sequence in live:
        scheduler.add(sequence)
    compared = 0
    with torch.no_grad():
        wanted = [theirs(torch.tensor([t])).logits[0, :, :VOCABULARY] for t in tokens]
    for _ in range(60):
        scheduler.admit()
        rows = scheduler.plan()
        if not rows:
            break
        logits = runner.forward(rows)
        scheduler.step_ended(rows)
        for row, got in zip([row for row in rows if row.samples], logits, strict=True):
            index = int(row.sequence.trajectory_id)
            position = row.start + row.count - 1
            torch.testing.assert_close(got, wanted[index][position], rtol=1e-4, atol=1e-4)
            compared += 1
            if position + 1 < len(tokens[index]):
                row.sequence.tokens.append(tokens[index][position + 1])
            else:
                scheduler.finish(row.sequence)
    assert compared == sum(len(t) - len(t) // 2 for t in tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_equal_transformers(kind):
    theirs, ours, _ = models(kind)
    sampling = SamplingParams(0.7)
    one = engine(ours, sampling=sampling)
    everything = requests(10)
    for request in everything:
        one.add(request)
    finished = run(one)
    for request in everything:
        got = finished[request.trajectory_id]
        ids = torch.tensor([[*request.prompt_ids, *got.response_ids]])
        with torch.no_grad():
            logits = theirs(ids).logits[0, len(request.prompt_ids) - 1 : -1, :VOCABULARY].double()
        for values, scale in ((got.logprobs_raw, 1.0), (got.logprobs_sampled, 0.7)):
            want = torch.log_softmax(logits / scale, -1).gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(values).double(), want, rtol=1e-4, atol=2e-4)


def test_responses_end_at_a_stop_token_or_at_the_limit():
    _, ours, _ = models("llama")
    one = engine(ours)
    everything = requests(40, seed=3)
    for request in everything:
        one.add(request)
    finished = run(one)
    reasons = set()
    for request in everything:
        got = finished[request.trajectory_id]
        reasons.add(got.finish_reason)
        assert len(got.response_ids) == len(got.logprobs_raw) == len(got.logprobs_sampled)
        assert not set(STOP) & set(got.response_ids[:-1])
        assert max(got.response_ids) < VOCABULARY
        if got.finish_reason == "stop":
            assert got.response_ids[-1] in STOP
        else:
            assert len(got.response_ids) == request.max_response_tokens
            assert got.response_ids[-1] not in STOP
    assert reasons == {"stop", "length"}


# --- bits: nothing but prompt, key and weights decides them


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_company_order_chunks_and_pauses_change_no_bit(kind, compute):
    model = models(kind)[1 if compute == "fp32" else 2]
    everything = [replace(r, prompt_ids=r.prompt_ids[:25], max_response_tokens=30) for r in requests(12, seed=4)]
    wanted = [alone(model, request) for request in everything]
    variants = [
        (CONFIG, everything),
        (replace(CONFIG, prefill_chunk_tokens=1), everything[::-1]),
        (replace(CONFIG, max_sequences=3, prefill_chunk_tokens=7), random.Random(2).sample(everything, 12)),
        (replace(CONFIG, num_pages=8, max_sequences=12), everything),
    ]
    pauses = 0
    for config, order in variants:
        one = engine(model, config)
        for request in order:
            one.add(request)
        finished = run(one)
        assert [bits(finished[request.trajectory_id]) for request in everything] == wanted
        pauses += sum(f.num_prefill_rebuilds for f in finished.values())
        assert all(f.num_kv_restores == 0 for f in finished.values())
    assert pauses > 0


@pytest.mark.parametrize("sampling", [SamplingParams(0.8, 10), SamplingParams(1.0, 0, 0.7)], ids=str)
def test_arrival_during_the_run_changes_no_bit(sampling):
    model = models("llama")[2]
    everything = requests(12, seed=5)
    wanted = [alone(model, request, sampling) for request in everything]
    one = engine(model, sampling=sampling)
    r, out, left = random.Random(0), {}, list(everything)
    while left or one.has_work():
        if left and r.random() < 0.4:
            one.add(left.pop())
        if one.has_work():
            out.update({f.trajectory_id: f for f in one.step()})
    assert [bits(out[request.trajectory_id]) for request in everything] == wanted


@pytest.mark.parametrize(("compute", "num_threads"), [("fp32", 1), ("bf16", 1), ("bf16", 2)])
def test_interrupted_at_random_equals_uninterrupted(compute, num_threads):
    """By spilled KV, by KV that is shorter than the log, and from the log alone; KV bytes too."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        model = models("qwen3")[1 if compute == "fp32" else 2]
        # Threads that share a busy machine's cores wait for each other at every product.
        everything = requests(9, seed=6) if num_threads == 1 else requests(5, seed=6)
        wanted = [alone(model, request) for request in everything]
        restores = rebuilds = 0
        for seed in (0, 1, 2) if num_threads == 1 else (2,):
            finished, counts = _run_interrupted(model, everything, random.Random(seed))
            restores, rebuilds = restores + counts[0], rebuilds + counts[1]
            assert [bits(finished[request.trajectory_id]) for request in everything] == wanted
        assert min(restores, rebuilds) > 0
    finally:
        torch.set_num_threads(before)


def _run_interrupted(model, everything, r) -> tuple[dict[str, Finished], list[int]]:
    finished: dict[str, Finished] = {}
    logged: dict[str, list[tuple[int, float, float]]] = {}
    spills: dict[str, bytes] = {}
    counts = [0, 0]
    while len(finished) < len(everything):
        config = replace(CONFIG, prefill_chunk_tokens=r.choice([1, 9, 40]), max_sequences=r.choice([2, 9]))
        log = MemoryLog()
        one = engine(model, config, log=log)
        for request in r.sample(everything, len(everything)):
            name = request.trajectory_id
            if name in finished:
                continue
            tokens = logged.get(name, [])
            ids, raw, sampled = (tuple(column) for column in zip(*tokens, strict=True)) if tokens else ((), (), ())
            kv = None
            if name in spills and r.random() < 0.7:
                kv = decode_kv(spills[name], name, one.kv_layout, name, [*request.prompt_ids, *ids])
            one.add(replace(request, logged_ids=ids, logged_raw=raw, logged_sampled=sampled, kv=kv))
        for _ in range(r.randint(1, 25)):
            if one.has_work():
                for f in one.step():
                    finished[f.trajectory_id] = f
                    counts[0] += f.num_kv_restores
                    counts[1] += f.num_prefill_rebuilds
        for name, tokens in log.tokens.items():
            logged[name] = logged.get(name, []) + tokens
        assert one.live() == {n: len(logged.get(n, [])) for n in one.live()}
        written: dict[str, bytes] = {}
        records = one.spill(written.__setitem__, math.inf)
        assert [record.name for record in records] == list(written)
        spills = {record.trajectory_id: written[record.name] for record in records}
        # A log whose tail was lost knows fewer tokens than the KV covers.
        for name in list(logged):
            if r.random() < 0.3 and name not in finished:
                logged[name] = logged[name][: r.randint(0, len(logged[name]))]
    return finished, counts


def test_kv_of_an_interrupted_trajectory_equals_the_uninterrupted_ones():
    model = models("llama")[2]
    request = replace(requests(6, seed=7)[5], max_response_tokens=60)
    spilled: list[dict[str, bytes]] = [{}, {}]

    def stop_after(one: RolloutEngine, tokens: int, into: dict[str, bytes]) -> tuple:
        while one.live()["t5"] < tokens:
            assert not one.step()
        one.spill(into.__setitem__, math.inf)
        log = one.log
        assert isinstance(log, MemoryLog)
        return tuple(zip(*log.tokens["t5"], strict=True))

    straight, first = (engine(model, stop_ids=()) for _ in range(2))
    straight.add(request)
    stop_after(straight, 20, spilled[0])
    first.add(request)
    ids, raw, sampled = stop_after(first, 9, {})
    rebuilt = engine(model, replace(CONFIG, prefill_chunk_tokens=3), stop_ids=())
    for companion in requests(4, seed=8):
        rebuilt.add(replace(companion, max_response_tokens=90))
    rebuilt.add(replace(request, logged_ids=ids, logged_raw=raw, logged_sampled=sampled))
    stop_after(rebuilt, 20, spilled[1])
    assert spilled[0]["t5.kv"] == spilled[1]["t5.kv"]


# --- durability


def test_nothing_is_handed_out_or_shown_before_it_is_durable():
    _, ours, _ = models("llama")
    log = MemoryLog(immediate=False)
    one = engine(ours, log=log)
    one.add(Request("short", (1, 2, 3), 5, 1))
    one.add(Request("long", (4, 5), 6, 40))
    for _ in range(5):
        assert one.step() == []
    assert one.live() == {"short": 0, "long": 0}
    log.acknowledged = 1  # the record of the first step: one token each
    assert one.live() == {"short": 1, "long": 1}
    assert [f.trajectory_id for f in one.step()] == []
    log.acknowledged = 2  # the finish record of "short"
    assert [f.trajectory_id for f in one.step()] == ["short"]
    finished = run(one)
    assert one.live() == {"short": 1, "long": len(finished["long"].response_ids)}
    assert log.finishes["short"] == (1, "length")


def test_with_the_real_log(tmp_path):
    _, ours, _ = models("qwen2")
    everything = requests(8, seed=9)
    header = LogHeader("r", 0, 0, 1, "s" * 64)
    with TokenLog(tmp_path / "log", header, seal_seconds=100.0) as log:
        one = engine(ours, log=log)
        for request in everything:
            one.add(request)
        finished = run(one)
        assert one.live() == {f.trajectory_id: len(f.response_ids) for f in finished.values()}
    recovered = recover(read_folder(tmp_path / "log"), "log").by_id()
    for name, f in finished.items():
        t = recovered[name]
        assert (tuple(t.ids.tolist()), t.finish_reason) == (f.response_ids, f.finish_reason)
        assert tuple(t.logprobs_raw.tolist()) == f.logprobs_raw
        assert tuple(t.logprobs_sampled.tolist()) == f.logprobs_sampled


def test_a_log_that_ends_with_the_response_only_needs_its_finish():
    _, ours, _ = models("llama")
    log = MemoryLog()
    one = engine(ours, log=log)
    one.add(Request("full", (1,), 3, 2, (9, 10), (-1.0, -2.0), (-1.5, -2.5)))
    one.add(Request("stopped", (1,), 4, 9, (9, 7), (-1.0, -2.0), (-1.5, -2.5)))
    finished = run(one)
    assert finished["full"] == Finished("full", (9, 10), (-1.0, -2.0), (-1.5, -2.5), "length", 0, 0)
    assert finished["stopped"].finish_reason == "stop"
    assert log.finishes == {"full": (2, "length"), "stopped": (2, "stop")}
    assert log.tokens == {}


def test_spill_ends_at_the_deadline_and_starts_with_the_longest():
    _, ours, _ = models("llama")
    one = engine(ours)
    for name, length in (("a", 3), ("b", 40), ("c", 20)):
        one.add(Request(name, tuple(range(length)), 1, 60))
    for _ in range(4):
        assert one.step() == []
    names: list[str] = []
    assert one.spill(lambda name, data: names.append(name), time.monotonic() - 1) == []

    def slow(name: str, data: bytes) -> None:
        names.append(name)
        time.sleep(0.02)

    one.spill(slow, time.monotonic() + 0.03)
    assert names == ["b.kv", "c.kv"]


# --- what could never run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "empty prompt"),
        ({"max_response_tokens": 0}, "max_response_tokens"),
        ({"prompt_ids": (1,) * 150, "max_response_tokens": 12}, "160 positions"),
        ({"prompt_ids": (VOCABULARY,)}, "below 61"),
        ({"prompt_ids": (-1,)}, "below 61"),
        ({"sampling_key": 1 << 64}, "64-bit"),
        ({"logged_ids": (1,), "logged_raw": (0.0,)}, "log-probabilities"),
        ({"logged_ids": (7, 1), "logged_raw": (0.0, 0.0), "logged_sampled": (0.0, 0.0)}, "stop token"),
        ({"logged_ids": (1,) * 6, "logged_raw": (0.0,) * 6, "logged_sampled": (0.0,) * 6}, "at most 5"),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_a_request_that_could_never_run_is_refused(change, message):
    one = engine(models("llama")[1])
    with pytest.raises(ContractError, match=message) as error:
        one.add(replace(Request("odd", (1, 2), 3, 5), **change))
    assert "odd" in error.value.where
    assert not one.has_work()
    one.add(Request("odd", (1, 2), 3, 5))
    assert run(one)["odd"].response_ids


def test_a_request_larger_than_the_cache_is_refused_and_the_largest_that_fits_runs():
    one = engine(models("llama")[1], replace(CONFIG, num_pages=3))
    with pytest.raises(ContractError, match="24 positions"):
        one.add(Request("a", (1,) * 20, 3, 6))
    one.add(Request("a", (1,) * 20, 3, 5))
    assert run(one)


def test_the_last_position_of_the_model_can_be_used():
    one = engine(models("llama")[1])
    one.add(Request("a", tuple(i % 5 for i in range(160)), 3, 1))
    assert len(run(one)["a"].response_ids) == 1


def test_a_second_request_of_one_trajectory_is_refused_even_when_it_is_finished():
    one = engine(models("llama")[1])
    one.add(Request("a", (1,), 3, 1))
    with pytest.raises(ContractError, match="once"):
        one.add(Request("a", (1,), 3, 1))
    run(one)
    with pytest.raises(ContractError, match="once"):
        one.add(Request("a", (2,), 3, 1))


@pytest.mark.parametrize(
    "change", [{"page_tokens": 12}, {"num_pages": 0}, {"max_sequences": 0}, {"prefill_chunk_tokens": 0}], ids=str
)
def test_sizes_that_do_not_fit_together_are_refused(change):
    with pytest.raises(ContractError, match="rollout engine"):
        engine(models("llama")[1], replace(CONFIG, **change))


def test_nan_logits_name_trajectory_and_position():
    from copy import deepcopy

    broken = deepcopy(models("llama")[1])
    with torch.no_grad():
        broken.model.embed_tokens.weight[40] = math.nan
        broken.model.embed_tokens.weight[:40] = 0.1
    log = MemoryLog()
    one = engine(broken, log=log)
    one.add(Request("bad", (1, 2, 3), 3, 5))
    with pytest.raises(ContractError, match="trajectory bad, position 3"):
        run(one)
    assert log.tokens == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_logged_log_probabilities_are_recomputed_from_a_pack_without_mismatch(kind, compute):
    """What training measures as the sampler's mismatch: another code path, whole sequences, one pack."""
    _, ours, small = models(kind)
    model = ours if compute == "fp32" else small
    everything = requests(6)
    finished = run_all(model, everything)
    ids, cu_tokens, positions = [], [0], []
    for request in everything:
        whole = [*request.prompt_ids, *finished[request.trajectory_id].response_ids]
        ids += whole
        positions += range(len(whole))
        cu_tokens.append(len(ids))
    with torch.no_grad():
        h_ND = model(torch.tensor(ids), torch.tensor(positions), SampledCausal(cu_tokens))
        logprobs_NV = torch.log_softmax(model.logits(h_ND, VOCABULARY).double(), 1)
    for request, first in zip(everything, cu_tokens, strict=False):
        done = finished[request.trajectory_id]
        rows = first + len(request.prompt_ids) - 1 + torch.arange(len(done.response_ids))
        again = logprobs_NV[rows, torch.tensor(done.response_ids)]
        torch.testing.assert_close(again, torch.tensor(done.logprobs_raw).double(), rtol=1e-6, atol=1e-6)


def run_all(model: Transformer, everything: list[Request]) -> dict[str, Finished]:
    one = engine(model, replace(CONFIG, page_tokens=SPLIT_TOKENS, split_tokens=SPLIT_TOKENS))
    for request in everything:
        one.add(request)
    return run(one)


@pytest.mark.parametrize(("stop_ids", "reason"), [(tuple(range(VOCABULARY)), "stop"), (STOP, "length")])
def test_a_response_has_at_least_one_token(stop_ids, reason):
    """The stop token is part of the response, and a limit of one leaves room for one."""
    one = engine(models("llama")[1], stop_ids=stop_ids)
    for request in requests(6):
        one.add(request if reason == "stop" else replace(request, max_response_tokens=1))
    found = run(one)
    assert [len(f.response_ids) for f in found.values()] == [1] * 6
    assert reason in {f.finish_reason for f in found.values()}
    with pytest.raises(ContractError, match="at least 1"):
        engine(models("llama")[1]).add(replace(requests(1)[0], max_response_tokens=0))
