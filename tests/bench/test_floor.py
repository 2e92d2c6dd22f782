"""The kernel of the floor, in the PTX machine: it gathers and adds what its name promises, and nothing is left out."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import fake_driver
import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("ziglang")

from cuda_tools import tool  # noqa: E402

from dsa_planner.bench import floor  # noqa: E402
from dsa_planner.kernels.ptx import decode, machine, parser  # noqa: E402

CTAS, PAIRS = 3, 64


@pytest.fixture(scope="module")
def vm(tmp_path_factory: pytest.TempPathFactory) -> machine.Machine:
    return machine.Machine(tmp_path_factory.mktemp("ptx-vm"))


@pytest.mark.parametrize("schedule", ["inorder", "random:1", "late:2"])
@pytest.mark.parametrize("keys", [1, 7, 500])
def test_a_pair_is_a_gathered_row_and_an_added_one(vm: machine.Machine, keys: int, schedule: str) -> None:
    code = decode.decode(parser.parse(floor.PTX).kernels["dsa_floor"])
    rows = machine.Buffer(np.ones((keys, floor.KEY_BYTES), np.uint8), 0, writable=False)
    sums = machine.Buffer(np.zeros((keys, floor.SUM_BYTES // 4), np.float32), 1)
    parameters = machine.pack_parameters(code, [rows.address, sums.address, keys, PAIRS])
    result = vm.launch(
        code, CTAS, floor.THREADS, floor.SHARED_BYTES, parameters, [rows, sums], machine.Schedule.parse(schedule)
    )
    assert not result.findings, "\n".join(map(str, result.findings))
    added = sums.array
    assert (added == added[:, :1]).all(), "a row is added as a whole"
    assert added[:, 0].sum() == CTAS * PAIRS
    assert (added[:, 0] > 0).sum() > 0.2 * min(keys, CTAS * PAIRS), "rows are spread over the keys"
    executed = dict(zip(code.opcodes, result.counts.sum(0), strict=True))
    gathers = next(count for name, count in executed.items() if name.startswith("cp.async.cg"))
    assert gathers * 32 * 16 == CTAS * PAIRS * floor.KEY_BYTES


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103"])
def test_the_assembler_takes_it_for_every_arch_of_the_envelope(tmp_path: Path, arch: str) -> None:
    if not Path(tool("ptxas")).is_file():
        pytest.skip("ptxas is not installed")
    (tmp_path / "floor.ptx").write_text(floor.PTX)
    subprocess.run(
        [tool("ptxas"), "-arch", arch, str(tmp_path / "floor.ptx"), "-o", str(tmp_path / "a.cubin")], check=True
    )


class Driver(fake_driver.FakeDriver):
    """Keeps the text that it is to assemble, and the launches of its kernel."""

    text = b""
    found: tuple[int, ...] = ()

    def cuLibraryLoadData(self, code: bytes, *options: object) -> tuple[object, ...]:  # noqa: N802
        self.text = code
        return fake_driver.SUCCESS, None

    def cuLibraryGetKernel(self, library: object, symbol: bytes) -> tuple[object, ...]:  # noqa: N802
        assert f".entry {symbol.decode()}(".encode() in self.text
        return fake_driver.SUCCESS, 1

    def cuKernelSetAttribute(self, attribute: object, value: int, handle: int, device: int) -> tuple[object, ...]:  # noqa: N802
        self.shared_limits["floor"] = value
        return (fake_driver.SUCCESS,)

    def cuLaunchKernelEx(self, config: object, function: int, parameters: int, extra: int) -> tuple[object, ...]:  # noqa: N802
        pointers = (ctypes.c_void_p * 4).from_address(parameters)
        sizes = (8, 8, 4, 4)
        values = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        self.found = tuple(int.from_bytes(value, "little") for value in values)
        assert config.sharedMemBytes == self.shared_limits["floor"]  # type: ignore[attr-defined]
        assert (config.gridDimX, config.blockDimX, int(config.hStream)) == (132, 256, 9)  # type: ignore[attr-defined]
        return (fake_driver.SUCCESS,)


def test_a_launch_has_one_cta_an_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    fake_driver.install(monkeypatch, driver)
    monkeypatch.setattr(floor, "cu", driver)
    launch, pairs = floor.launcher(0)
    assert pairs == 132 * floor.PAIRS_OF_A_CTA
    launch(1 << 40, 1 << 41, 4096, 9)
    assert driver.found == (1 << 40, 1 << 41, 4096, floor.PAIRS_OF_A_CTA)
    assert driver.text.endswith(b"}\n\0")
