from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from dsa_planner import CompilerMissingError, toolchain


def write_package(site: Path, name: str, version: str, record: list[str]) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("\n".join(record) + "\n")


FILES = ["nvidia_cutlass_dsl/a.py,sha256=AAAA,10", "nvidia_cutlass_dsl/b.so,sha256=BBBB,20"]


@pytest.fixture
def build_id_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    count = 0
    distributions = importlib.metadata.distributions

    def make(record: list[str], version: str = "4.8.1", more: tuple[str, ...] = ()) -> str:
        nonlocal count
        count += 1
        site = tmp_path / str(count)
        write_package(site, "nvidia-cutlass-dsl", version, record)
        for name in more:
            write_package(site, name, version, ["x.so,sha256=CCCC,1"])
        found = list(distributions(path=[str(site)]))
        monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
        toolchain.installed.cache_clear()
        return toolchain.installed().build_id

    yield make
    monkeypatch.undo()
    toolchain.installed.cache_clear()


def test_the_build_id_is_that_of_the_contents_not_of_the_installation(build_id_of) -> None:  # type: ignore[no-untyped-def]
    plain = build_id_of(FILES)
    as_installed = [
        "../../../bin/run-iket,sha256=of-a-script-that-names-the-interpreter,1",
        "nvidia_cutlass_dsl/__pycache__/a.cpython-311.pyc,,",
        "nvidia_cutlass_dsl-4.8.1.dist-info/INSTALLER,sha256=pip-or-uv,4",
        "nvidia_cutlass_dsl-4.8.1.dist-info/RECORD,,",
        *reversed(FILES),
    ]
    assert build_id_of(as_installed) == plain
    assert len(plain) == 64


def test_another_content_version_or_package_is_another_build(build_id_of) -> None:  # type: ignore[no-untyped-def]
    ids = {
        build_id_of(FILES),
        build_id_of([FILES[0].replace("AAAA", "AAAB"), FILES[1]]),
        build_id_of(FILES[:1]),
        build_id_of(FILES, version="4.9.0"),
        build_id_of(FILES, more=("nvidia-cutlass-dsl-libs-cu12",)),
        build_id_of(FILES, more=("nvidia-cutlass-dsl-libs-cu13",)),
        build_id_of(FILES, more=("nvidia_cutlass_dsl.libs_base",)),
    }
    assert len(ids) == 7


def test_a_compiler_that_is_too_old_is_refused(build_id_of) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CompilerMissingError, match=r"nvidia-cutlass-dsl 4\.8\.0: version 4\.8\.1 or newer is needed"):
        build_id_of(FILES, version="4.8.0")
    assert build_id_of(FILES, version="4.10.0")


def test_no_compiler_is_an_error_with_the_way_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.installed.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "distributions", list)
        with pytest.raises(CompilerMissingError, match=r"pip install 'dsa-planner\[compile\]'"):
            toolchain.installed()
    toolchain.installed.cache_clear()


def test_the_installed_compiler_has_an_id() -> None:
    tools = toolchain.installed()
    assert set(tools.packages) >= {"nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base"}
    assert len(tools.build_id) == 64
