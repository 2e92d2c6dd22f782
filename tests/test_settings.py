from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from dsa_planner import CacheError, UnsupportedError
from dsa_planner.settings import Settings, default_cache_dir


@pytest.mark.parametrize("xdg", [None, "", "relative", "/somewhere"])
def test_the_default_writable_layer_is_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, xdg: str | None) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    expected = platformdirs.user_cache_dir("dsa-planner", appauthor=False)
    assert Settings.from_environment().cache_dir == Path(expected)


def test_variables_are_read() -> None:
    settings = Settings.from_environment(
        {"DSA_PLAN_PATH": "/a::/b c:", "DSA_PLAN_CACHE_DIR": "/w", "DSA_PLAN_CACHE_BYTES": "5000"}
    )
    assert settings == Settings((Path("/a"), Path("/b c")), Path("/w"), 5000)


def test_folders_are_absolute_and_may_begin_with_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_environment({"DSA_PLAN_PATH": "~/a:b:../c", "DSA_PLAN_CACHE_DIR": "~"})
    assert settings.read_only == (Path("/home/me/a"), tmp_path / "b", tmp_path.parent / "c")
    assert settings.cache_dir == Path("/home/me")
    with pytest.raises(
        UnsupportedError, match="DSA_PLAN_PATH='~nobody-of-that-name/x': no home folder is known for it"
    ):
        Settings.from_environment({"DSA_PLAN_PATH": "~nobody-of-that-name/x"})
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        UnsupportedError, match="DSA_PLAN_CACHE_DIR='x': it is relative, and the working folder is gone"
    ):
        Settings.from_environment({"DSA_PLAN_CACHE_DIR": "x"})
    assert Settings.from_environment({"DSA_PLAN_CACHE_DIR": "/x"}).cache_dir == Path("/x")


def test_what_jobs_do_is_read() -> None:
    default = Settings.from_environment({})
    assert (default.compile, default.audit, default.module_bytes) == ("never", False, 256 << 20)
    chosen = {"DSA_PLAN_COMPILE": "missing", "DSA_PLAN_AUDIT": "1", "DSA_PLAN_MODULE_BYTES": "5000"}
    settings = Settings.from_environment(chosen)
    assert (settings.compile, settings.audit, settings.module_bytes) == ("missing", True, 5000)
    for name, value, message in (
        ("DSA_PLAN_COMPILE", "always", "DSA_PLAN_COMPILE='always': it has to be never or missing; unset it"),
        ("DSA_PLAN_AUDIT", "yes", "DSA_PLAN_AUDIT='yes': it has to be 0 or 1; unset it"),
        ("DSA_PLAN_MODULE_BYTES", "0", "DSA_PLAN_MODULE_BYTES='0': it has to be a number of bytes"),
        ("DSA_PLAN_MODULE_BYTES", "1G", "DSA_PLAN_MODULE_BYTES='1G': it has to be a number of bytes"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            Settings.from_environment({name: value})


def test_none_means_no_writable_layer() -> None:
    settings = Settings.from_environment({"DSA_PLAN_CACHE_DIR": "none"})
    assert settings.cache_dir is None
    with pytest.raises(CacheError, match="set DSA_PLAN_CACHE_DIR to a folder"):
        settings.require_cache_dir()


@pytest.mark.parametrize("value", ["0", "-1", "1G", "1.5", "٣", " 5", "9" * 19, "9" * 5000])
def test_a_limit_that_is_no_positive_integer_is_refused(value: str) -> None:
    with pytest.raises(UnsupportedError, match="DSA_PLAN_CACHE_BYTES"):
        Settings.from_environment({"DSA_PLAN_CACHE_BYTES": value})


def test_the_way_to_launch() -> None:
    assert Settings.from_environment({}).launch == "graph"
    assert Settings.from_environment({"DSA_PLAN_LAUNCH": "kernels"}).launch == "kernels"
    with pytest.raises(UnsupportedError, match="DSA_PLAN_LAUNCH='eager': it has to be graph or kernels"):
        Settings.from_environment({"DSA_PLAN_LAUNCH": "eager"})


def test_home_unset_uses_the_password_file_and_an_unknown_user_has_no_default() -> None:
    assert default_cache_dir({}) == Path(os.path.expanduser("~")) / ".cache" / "dsa-planner"
    script = (
        "import os; from dsa_planner.settings import Settings; os.setuid(54321);"
        "print(Settings.from_environment({}).cache_dir)"
    )
    if os.geteuid() != 0:
        pytest.skip("becoming a user that the password file does not know needs root")
    out = subprocess.run([sys.executable, "-c", script], env={}, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "None"
