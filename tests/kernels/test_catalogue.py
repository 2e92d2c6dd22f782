from __future__ import annotations

from pathlib import Path

import pytest

from dsa_planner import envelope
from dsa_planner.kernels import catalogue


def built() -> list[str]:
    return sorted({row.kernel for row in envelope.ENVELOPE})


@pytest.mark.parametrize("name", built())
def test_an_entry_is_plain_data(name: str) -> None:
    from dsa_planner.cache.canonical import canonical_json

    kernel = catalogue.load(name)
    assert kernel.module == f"dsa_planner.kernels.{name}"
    assert len(kernel.source_digest) == 64
    canonical_json({"options": dict(kernel.options), "launch": dict(kernel.launch)})


def test_a_kernel_without_an_entry_is_not_found() -> None:
    with pytest.raises(FileNotFoundError):
        catalogue.load("nothing")


def test_the_digest_is_that_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "k.json").write_text('{"sources": ["k.py"], "options": {}, "launch": {}}')
    (tmp_path / "k.py").write_text("one")
    first = catalogue.load("k", tmp_path).source_digest
    assert first == catalogue.digest_sources({"k.py": b"one"})
