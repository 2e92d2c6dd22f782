"""The machine, compiled once a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dsa_planner.kernels.ptx.machine import Machine


@pytest.fixture(scope="session")
def vm(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    pytest.importorskip("numpy")
    pytest.importorskip("ziglang")
    from dsa_planner.kernels.ptx.machine import Machine

    return Machine(tmp_path_factory.mktemp("ptx-vm"))
