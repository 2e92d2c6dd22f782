"""The audit: launches that share memory without order are found, and no others. A driver made of Python."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dsa_cases  # noqa: E402
import fake_driver  # noqa: E402
from dsa_cases import outputs  # noqa: E402

import dsa_planner  # noqa: E402
from dsa_planner import audit  # noqa: E402


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, layer: Path) -> fake_driver.FakeDriver:
    fake = fake_driver.FakeDriver()
    fake_driver.install(monkeypatch, fake)
    monkeypatch.setattr(audit, "_counts", {"audited": 0, "found": 0})
    return fake


def lane(seed: int) -> dict[str, Any]:
    case = dsa_cases.make(1, 2, 20, 128, seed=seed)
    return {**case.inputs(), **outputs(case, torch.bfloat16)}


@pytest.mark.parametrize("shared", ["workspace", "d_index_q", "attn_score", "weights of d_weights"])
def test_shared_memory_is_found_and_both_callers_are_named(fake: fake_driver.FakeDriver, shared: str) -> None:
    plan = dsa_planner.load_plan(128)
    one, other = lane(0), lane(1)
    name = shared.split()[0]
    if name == "workspace":
        one[name] = other[name] = torch.empty(plan.workspace_bytes(1, 20), dtype=torch.uint8)
    elif name == "weights":
        other["weights"] = one["d_weights"]
    else:
        other[name] = one[name]
    fake.unfinished = {5}
    plan.launch(**one, stream=5, audit=True)
    before = len(fake.launches)
    with pytest.raises(dsa_planner.AuditError) as error:
        plan.launch(**other, stream=6, audit=True)
    text = str(error.value)
    assert text.startswith(f"{name} of the launch at {__file__}:")
    assert f"it is also {shared.split()[-1]} of the launch at {__file__}:" in text
    assert text.count("in test_shared_memory_is_found_and_both_callers_are_named") == 2
    assert "stream 0x5" in text
    assert "stream 0x6" in text
    assert len(fake.launches) == before, "before anything of it runs"
    assert audit.audit_stats() == {"audited": 1, "found": 1}
    fake.unfinished = set()
    plan.launch(**other, stream=6, audit=True)


def test_what_is_ordered_or_shares_nothing_or_only_reads_is_not_accused(fake: fake_driver.FakeDriver) -> None:
    plan = dsa_planner.load_plan(128)
    one, other = lane(0), lane(1)
    fake.unfinished = {5}
    plan.launch(**one, stream=5, audit=True)
    plan.launch(**one, stream=5, audit=True)
    plan.launch(**{**other, "weights": one["weights"], "index_k": one["index_k"]}, stream=6, audit=True)
    # A stream that waits for the first one ends no sooner.
    fake.unfinished = {5, 6}
    queries = 0
    query = fake.cuEventQuery

    def counted(event: int) -> Any:
        nonlocal queries
        queries += 1
        if queries == 20:
            fake.unfinished = set()
        return query(event)

    fake.cuEventQuery = counted  # type: ignore[method-assign]
    plan.launch(**{**other, "d_index_q": one["d_index_q"]}, stream=6, audit=True)
    assert queries >= 20
    assert audit.audit_stats()["found"] == 0


def test_the_environment_turns_it_on_for_every_launch(
    fake: fake_driver.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSA_PLAN_AUDIT", "1")
    given = lane(0)
    inputs = {name: tensor for name, tensor in given.items() if not name.startswith("d_")}
    fake.unfinished = {5}
    dsa_planner.indexer_backward(**given, stream=5)
    with pytest.raises(dsa_planner.AuditError, match="attn_score of the launch"):
        dsa_planner.indexer_backward(**given, stream=6)
    dsa_planner.indexer_backward(**given, stream=6, audit=False)
    fake.capturing = {7}
    fake.permanent.add(7)
    workspace = torch.empty(dsa_planner.load_plan(128).workspace_bytes(1, 20), dtype=torch.uint8)
    dsa_planner.indexer_backward(**given, stream=7, workspace=workspace)
    assert audit.audit_stats() == {"audited": 1, "found": 1}
    del inputs


def test_events_of_ended_launches_are_given_back(fake: fake_driver.FakeDriver) -> None:
    plan = dsa_planner.load_plan(128)
    given = lane(0)
    destroyed: list[int] = []
    fake.cuEventDestroy = lambda event: (destroyed.append(event), (fake_driver.SUCCESS,))[1]  # type: ignore[method-assign]
    for stream in range(100, 150):
        plan.launch(**given, stream=stream, audit=True)
    assert len(destroyed) == len(fake.events) - 1


def test_who_waits_holds_up_nobody_else(fake: fake_driver.FakeDriver) -> None:
    """A launch may wait for one that ends only after what another thread launches."""
    plan = dsa_planner.load_plan(128)
    one, other = lane(0), lane(1)
    fake.unfinished = {5, 6}
    plan.launch(**one, stream=5, audit=True)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            plan.launch(**one, stream=6, audit=True)
        except BaseException as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    plan.launch(**other, stream=7, audit=True)
    assert waiting.is_alive()
    fake.unfinished = set()
    waiting.join(20)
    assert not waiting.is_alive()
    assert not failures
    assert audit.audit_stats() == {"audited": 3, "found": 0}


@pytest.mark.parametrize("audit", [1, "yes", torch.zeros(2)])
def test_it_is_on_or_off(fake: fake_driver.FakeDriver, audit: Any) -> None:
    with pytest.raises(dsa_planner.UnsupportedError, match=r"audit=.*: it must be True, False or None"):
        dsa_planner.load_plan(128).launch(**lane(0), audit=audit)
    assert not fake.launches
