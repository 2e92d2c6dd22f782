"""The errors that users see. Each says what was asked, which rule it broke, and what to do next.

A leaf: it imports nothing of this project, so that every part of it can raise these.
"""

from __future__ import annotations

import errno

_LONGEST = 120  # characters of a value
_LIMITS = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (sysctl fs.file-max)",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
}


class DsaPlannerError(Exception):
    """Base of all errors that this package raises on purpose. Its text is one line, whatever names are in it.

    Args:
        asked: what was asked or found, with the value.
        rule: the rule that it broke.
        remedy: what to do next.
    """

    def __init__(self, asked: str, rule: str, remedy: str) -> None:
        super().__init__(asked, rule, remedy)
        self.asked = asked
        self.rule = rule
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.asked}: {self.rule}; {self.remedy}"
        return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """A value for a message: its repr, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, for one
        return f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def remedy_of(error: OSError, otherwise: str) -> str:
    """What to do about an error of the system: raise the limit that was met, or what the place calls for ``otherwise``.

    Such limits have nothing to do with what was being read or written, so another place would not help.
    """
    return _LIMITS.get(error.errno or 0, otherwise)


class UnsupportedError(DsaPlannerError, ValueError):
    """A request outside the support envelope: a wrong value, shape, dtype or stride."""


class DeviceMismatchError(DsaPlannerError, RuntimeError):
    """A plan, a tensor and a device that do not belong together."""


class PlanNotFoundError(DsaPlannerError, LookupError):
    """No layer holds the plan."""


class PlanFileError(DsaPlannerError):
    """A plan file that is damaged, mislabelled, or not a plan file."""


class CacheError(DsaPlannerError):
    """A layer that cannot be read or written: no place for it, no permission, no room."""


class CompileError(DsaPlannerError, RuntimeError):
    """A compilation that failed, ran out of time, or returned something else than the plan."""


class CompilerMissingError(CompileError):
    """The compiler (nvidia-cutlass-dsl) is not installed."""


class VerifierMissingError(DsaPlannerError, RuntimeError):
    """What proves plans without a GPU (numpy, ziglang) is not installed, or does not work here."""


class PackageMissingError(DsaPlannerError, RuntimeError):
    """A package that what was asked for needs (torch, matplotlib) is not installed."""


class DriverError(DsaPlannerError, RuntimeError):
    """The CUDA driver is missing, too old, or refused a call."""


class CaptureError(DsaPlannerError, RuntimeError):
    """A call under stream capture that a replay could not repeat: it would load, or use memory that the graph lacks."""


class AuditError(DsaPlannerError, RuntimeError):
    """Two launches that may run at the same time and write the same memory."""


class RequirementError(DsaPlannerError, RuntimeError):
    """Plans that were required and are not all there, intact, loadable, and the same on every rank.

    Attributes:
        problems: one line for each.
    """

    def __init__(self, asked: str, problems: tuple[str, ...], remedy: str) -> None:
        super().__init__(asked, "; ".join(problems), remedy)
        self.problems = problems

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...], str]]:
        return type(self), (self.asked, self.problems, self.remedy)
