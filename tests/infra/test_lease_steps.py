"""Between two steps of a lease: what another process, a lost answer or a damaged object may do there."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from infra.leases import FinishedEpoch, Lease, acquire, finished, release
from infra.store import ObjectStore
from infra.store_local import LocalStore
from schemas import keys
from schemas.errors import ContractError, FormatError, StoreError
from tests.infra.test_leases import OWNED, take, take_or_find


class Interposed:
    """The store itself, with something done before or after its n-th operation."""

    def __init__(self, store: ObjectStore, before: dict[int, Callable[[], None]], lose_answer: bool = False) -> None:
        self.root, self._store, self._before, self._lose_answer = store.root, store, before, lose_answer
        self.calls = 0

    def within(self, _seconds: float) -> Interposed:
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self.calls += 1
            if self.calls in self._before:
                self._before[self.calls]()
            answer = method(*args)
            if name == "put_if_absent" and self._lose_answer:
                self._lose_answer = False
                raise StoreError(args[0], expected="an answer", found="connection reset")
            return answer

        return call


def test_whatever_happens_between_two_steps_of_an_acquire_the_newest_epoch_decides(tmp_path: Path):
    """A rival takes the lease, or takes it and finishes, before each single store operation."""
    outcomes = set()
    for rival_finishes in (False, True):
        for at in range(1, 12):
            store = LocalStore(tmp_path / f"{rival_finishes}{at}")
            release(take(store))

            def rival(store: ObjectStore = store, finishes: bool = rival_finishes) -> None:
                lease = take(store, "rival")
                if finishes:
                    lease.finish({"by": "rival"})
                else:
                    release(lease)

            interposed = Interposed(store, {at: rival})
            outcome = take_or_find(interposed, "someone", 0.0)  # pyright: ignore[reportArgumentType]
            happened = interposed.calls >= at
            if isinstance(outcome, FinishedEpoch):
                assert rival_finishes
                assert outcome == finished(store, OWNED) == FinishedEpoch(3, {"by": "rival"})
            else:
                assert not (happened and rival_finishes)
                assert outcome.epoch == (3 if happened else 2)
                outcome._store = store
                outcome.check()
            outcomes.add((happened, type(outcome).__name__))
    assert outcomes == {(True, "FinishedEpoch"), (True, "Lease"), (False, "Lease")}


def test_a_lost_answer_is_resolved_by_the_nonce(store: ObjectStore):
    lease = acquire(Interposed(store, {}, lose_answer=True), OWNED, owner={}, dead_after_seconds=9.0)  # pyright: ignore[reportArgumentType]
    assert isinstance(lease, Lease)
    assert lease.epoch == 1
    lease._store = Interposed(store, {}, lose_answer=True)  # pyright: ignore[reportAttributeAccessIssue]
    lease.finish({"rows": 1})
    assert finished(store, OWNED) == FinishedEpoch(2, {"rows": 1})


def test_a_put_that_never_arrived_is_an_error_and_no_epoch(store: ObjectStore):
    def unreachable() -> None:
        raise StoreError("server", expected="an answer", found="unreachable")

    with pytest.raises(StoreError):
        acquire(Interposed(store, {2: unreachable}), OWNED, owner={}, dead_after_seconds=9.0)  # pyright: ignore[reportArgumentType]
    assert store.list(keys.epochs(OWNED)) == []


def test_heartbeats_go_on_after_the_store_was_away(store: ObjectStore):
    lease = take(store)

    def away() -> None:
        raise StoreError("server", expected="an answer", found="unreachable")

    interposed = Interposed(store, dict.fromkeys(range(1, 6), away))
    lease._beats = interposed  # pyright: ignore[reportAttributeAccessIssue]
    lease.start_heartbeat(0.01)
    deadline = time.monotonic() + 30
    while store.head(keys.heartbeat(OWNED, 1)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert interposed.calls > 5
    release(lease)


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"null", b'{"kind":"lease"}', b'{"kind":"x","epoch":1,"nonce":"n","owner":{}}']
)
def test_a_damaged_epoch_object_is_named(store: ObjectStore, damage: bytes):
    store.put(keys.epoch(OWNED, 1), damage)
    for call in (lambda: take(store), lambda: finished(store, OWNED)):
        with pytest.raises(FormatError) as caught:
            call()
        assert keys.epoch(OWNED, 1) in caught.value.where


def test_a_strange_name_among_the_epochs_is_named(store: ObjectStore):
    store.put(keys.epochs(OWNED) + "000001.json.bak", b"{}")
    with pytest.raises(FormatError):
        finished(store, OWNED)


class Ownership(RuleBasedStateMachine):
    """Any order of takeovers, heartbeats, checks, releases and finishes, against a list of what was granted."""

    held = Bundle("held")

    @initialize()
    def begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.store = LocalStore(Path(self._folder.name))
        self.granted: list[Lease] = []
        self.result: dict[str, int] | None = None

    def teardown(self) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    @rule(target=held)
    def take_over(self) -> Lease | None:
        outcome = take_or_find(self.store, "someone", 0.0)
        if self.result is not None:
            assert outcome == FinishedEpoch(len(self.granted) + 1, self.result)
            return None
        assert isinstance(outcome, Lease)
        self.granted.append(outcome)
        assert outcome.epoch == len(self.granted)
        return outcome

    @rule(lease=held)
    def beat(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.heartbeat()

    @rule(lease=held)
    def give_back(self, lease: Lease | None) -> None:
        if lease is not None:
            release(lease)

    @rule(lease=held)
    def ask(self, lease: Lease | None) -> None:
        if lease is None:
            return
        if lease is self.granted[-1]:
            lease.check()
        else:
            with pytest.raises(ContractError):
                lease.check()

    @rule(lease=held, rows=st.integers(0, 2))
    def conclude(self, lease: Lease | None, rows: int) -> None:
        if lease is None:
            return
        if lease is self.granted[-1] and self.result in (None, {"rows": rows}):
            lease.finish({"rows": rows})
            self.result = {"rows": rows}
        else:
            with pytest.raises(ContractError):
                lease.finish({"rows": rows})

    @invariant()
    def one_result(self) -> None:
        if hasattr(self, "store"):
            found = finished(self.store, OWNED)
            assert (found.manifest if found else None) == self.result
            numbers = len(self.granted) + (self.result is not None)
            assert self.store.list(keys.epochs(OWNED)) == [keys.epoch(OWNED, n + 1) for n in range(numbers)]


TestOwnership = Ownership.TestCase
TestOwnership.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
