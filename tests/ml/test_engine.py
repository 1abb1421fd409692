"""The rollout engine against transformers; nothing is shown before it is durable."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch

from ml.model import SPLIT_TOKENS, SampledCausal, Transformer
from ml.rollout.requests import Finished, Request
from ml.rollout.runner import Runner
from ml.rollout.sampling import SamplingParams
from ml.rollout.scheduler import Scheduler, Sequence
from ml.rollout.wal import TokenLog
from ml.rollout.wal_format import LogHeader
from ml.rollout.wal_recovery import read_folder, recover
from schemas.errors import ContractError
from schemas.interruptions import UNINTERRUPTED
from tests.support.rollout_world import CONFIG, KINDS, STOP, VOCABULARY, MemoryLog, engine, models, requests, run

# --- values: transformers is the oracle


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_chunks_and_single_steps_equal_transformers(kind, monkeypatch):
    theirs, ours, _ = models(kind)
    r = random.Random(1)
    tokens = [[r.randrange(VOCABULARY) for _ in range(n)] for n in (50, 1, 16, 23)]
    scheduler = Scheduler(max_sequences=8, page_tokens=8, num_pages=40, prefill_tokens=19)
    runner = Runner(ours, max_sequences=8, num_pages=40, page_tokens=8, split_tokens=16, vocab_size=VOCABULARY,
                    sampling=SamplingParams(), graphs=False)  # fmt: skip
    with torch.no_grad():
        wanted = [theirs(torch.tensor([t])).logits[0, :, :VOCABULARY] for t in tokens]
    compared = 0

    def given(logits_SV, keys_S, positions_S, **_):
        """The text's next token, in place of a sampled one; a sequence's key is its number."""
        nonlocal compared
        ids = []
        for got, index, position in zip(logits_SV, keys_S.tolist(), positions_S.tolist(), strict=True):
            torch.testing.assert_close(got, wanted[index][position - 1], rtol=1e-4, atol=1e-4)
            compared += 1
            ids.append((tokens[index] + [0])[position])
        return torch.tensor(ids), torch.zeros(len(ids)), torch.zeros(len(ids))

    monkeypatch.setattr("ml.rollout.runner.sample", given)
    # A sequence starts with half of its tokens; the rest come one by one, as ids of the step before on the device.
    for i, t in enumerate(tokens):
        scheduler.add(Sequence(str(i), t[: 1 + len(t) // 2], 1, len(t) + 1))
    for _ in range(60):
        if admitted := scheduler.admit():
            runner.admit(admitted, [int(a.sequence.trajectory_id) for a in admitted])
        plan = scheduler.plan()
        if not plan:
            break
        collected = runner.collect(runner.launch(plan))
        scheduler.step_ended(scheduler.launched(plan))
        assert not collected.raw_R.any()
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
    assert finished["full"] == Finished("full", (9, 10), (-1.0, -2.0), (-1.5, -2.5), "length", UNINTERRUPTED)
    assert finished["stopped"].finish_reason == "stop"
    assert log.finishes == {"full": (2, "length"), "stopped": (2, "stop")}
    assert log.tokens == {}


def test_spill_goes_on_after_a_write_that_could_not_be():
    """The smallest first, which shows the rate; then all that fits at once, the longest first, whose prefill costs
    most a byte."""
    _, ours, _ = models("llama")
    one = engine(ours)
    for name, length in (("a", 3), ("b", 40), ("c", 20), ("d", 30)):
        one.add(Request(name, tuple(range(length)), 1, 60))
    for _ in range(4):
        assert one.step() == []
    names: list[str] = []

    def write(name: str, parts: list[memoryview]) -> bool:
        names.append(name)
        return name != "b.kv"

    assert one.spill(write, time.monotonic() - 1) == []
    assert names == []
    records = one.spill(write, time.monotonic() + 60)
    assert names[0] == "a.kv"
    assert sorted(names) == ["a.kv", "b.kv", "c.kv", "d.kv"]
    assert [r.trajectory_id for r in records] == ["a", "d", "c"]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_runs_ahead_of_a_stop_token_is_not_logged(steps_in_flight):
    log = MemoryLog()
    one = engine(models("llama")[1], replace(CONFIG, steps_in_flight=steps_in_flight), log=log)
    for request in requests(20, seed=3):
        one.add(request)
    finished = run(one)
    assert "stop" in {f.finish_reason for f in finished.values()}
    for name, f in finished.items():
        columns = f.response_ids, f.logprobs_raw, f.logprobs_sampled
        assert log.tokens[name] == list(zip(*columns, strict=True))
        assert log.finishes[name] == (len(f.response_ids), f.finish_reason)


def test_kv_of_a_paused_trajectory_is_spilled_too():
    _, ours, _ = models("llama")
    one = engine(ours, replace(CONFIG, num_pages=9), stop_ids=())
    for name in "abcd":
        one.add(Request(name, (1, 2, 3, ord(name) - 90), ord(name), 40))
    written: dict[str, bytes] = {}
    for _ in range(21):
        one.step()
    tokens = one.live()
    records = one.spill(lambda name, parts: written.update({name: b"".join(parts)}) or True, time.monotonic() + 60)
    assert len({r.positions for r in records}) > 1  # one of them stopped earlier, to make room
    assert {r.trajectory_id: r.positions for r in records} == {name: 3 + count for name, count in tokens.items()}
    assert set(written) == {f"{name}.kv" for name in "abcd"}
