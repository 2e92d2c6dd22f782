"""Fixtures that several tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# The oracle multiplies many small matrices. Where tests share their cores with something else, threads that wait for each
# other make that ten times as slow.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def no_user_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Tests neither read nor write the user's layers. GPU tests keep the settings: their plans come from there."""
    if request.node.get_closest_marker("gpu"):
        return
    for name in [name for name in os.environ if name.startswith("DSA_PLAN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg-cache"))


@pytest.fixture(scope="session")
def config() -> dict[str, object]:
    """A plan config that this version builds."""
    from dsa_planner import envelope

    return envelope.plan_config({"arch": "sm_90a", "topk": 128})


@pytest.fixture(scope="session")
def compiled(config: dict[str, object]):  # type: ignore[no-untyped-def]
    """The plan of ``config``, compiled once a session."""
    from dsa_planner.compiler import compile_plan

    return compile_plan(config).plan


@pytest.fixture(scope="session")
def compiled_v2():  # type: ignore[no-untyped-def]
    """A plan that draws rows by tickets, compiled once a session."""
    from dsa_planner.compiler import compile_plan

    return compile_plan({"backend": "sm90_v2", "arch": "sm_90a", "topk": 128, "d_weights": "fp32"}).plan


@pytest.fixture
def layer(compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # type: ignore[no-untyped-def]
    """A layer that holds the compiled plan, and that the settings name as read-only."""
    from dsa_planner.cache.writable import WritableLayer

    root = tmp_path / "layer"
    WritableLayer(root, 1 << 30).publish(compiled)
    monkeypatch.setenv("DSA_PLAN_PATH", str(root))
    return root


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, layer: Path):  # type: ignore[no-untyped-def]
    """A driver made of Python in the real one's place, and a layer that holds the compiled plan."""
    import fake_driver

    driver = fake_driver.FakeDriver()
    fake_driver.install(monkeypatch, driver)
    return driver
