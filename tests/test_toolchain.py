from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from dsa_planner import CompileError, CompilerMissingError, toolchain


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


def test_of_two_installations_the_one_that_an_import_finds_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, version in (("first", "4.9.9"), ("second", "4.8.1")):
        write_package(tmp_path / name, "nvidia-cutlass-dsl", version, FILES)
    both = list(importlib.metadata.distributions(path=[str(tmp_path / "first"), str(tmp_path / "second")]))
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: both)
    toolchain.installed.cache_clear()
    tools = toolchain.installed()
    toolchain.installed.cache_clear()
    assert tools.packages == {"nvidia-cutlass-dsl": "4.9.9"}
    assert list(tools.files) == [
        str(tmp_path / "first" / name) for name in ("nvidia_cutlass_dsl/a.py", "nvidia_cutlass_dsl/b.so")
    ]


def test_an_installation_that_lists_no_files_is_refused(build_id_of) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CompilerMissingError, match="its RECORD lists no files, so that builds cannot be told apart"):
        build_id_of(["nvidia_cutlass_dsl-4.8.1.dist-info/RECORD,,", "short"])


def test_the_program_that_runs_the_compiler_is_part_of_the_build(
    build_id_of,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    plain = build_id_of(FILES)
    (tmp_path / "worker.py").write_bytes(toolchain.WORKER.read_bytes() + b"\n")
    monkeypatch.setattr(toolchain, "WORKER", tmp_path / "worker.py")
    assert build_id_of(FILES) != plain


def test_an_edited_or_missing_compiler_file_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"content")
    digest = "7XACtDnprIRfIjV9giusFERzD722AW0-yUMil7nsn3M"
    tools = toolchain.Toolchain("0" * 64, {}, {str(path): digest})
    monkeypatch.setattr(toolchain, "installed", lambda: tools)
    verify = toolchain.verify.__wrapped__
    verify()
    path.write_bytes(b"Content")
    with pytest.raises(CompileError, match=r"a\.py: it is not the one that was installed; install it from a wheel"):
        verify()
    path.unlink()
    with pytest.raises(CompileError, match=r"a\.py: it cannot be read \(No such file or directory\)"):
        verify()


def test_the_installed_compiler_is_what_its_record_says() -> None:
    assert len(toolchain.installed().files) > 100
    toolchain.verify.__wrapped__()


def test_the_installed_compiler_has_an_id() -> None:
    tools = toolchain.installed()
    assert set(tools.packages) >= {"nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base"}
    assert len(tools.build_id) == 64
