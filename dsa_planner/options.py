"""The words and numbers that options of a command line have. Standard library only."""

from __future__ import annotations

import math

from dsa_planner.errors import UnsupportedError, shown

__all__ = ["integer", "positive", "words"]

_LONGEST_NUMBER = 9  # digits


def integer(
    option: str, text: str, example: int, least: int = -(10**_LONGEST_NUMBER), longest: int = _LONGEST_NUMBER
) -> int:
    """The whole number that an option has.

    Args:
        option: its name, and an ``example`` of its value, for the message.
        text: what the user gave.
        least: the smallest that it may be.
        longest: digits that it may have.

    Raises:
        UnsupportedError: it is none, below ``least``, or too long.
    """
    digits = text.removeprefix("-")
    whole = digits.isascii() and digits.isdigit()
    if whole and len(digits) <= longest and int(text) >= least:
        return int(text)
    bound = f" of at least {least}" if least >= 0 else ""
    if whole and len(digits) > longest:
        bound += f"{' and' if bound else ' of'} at most {longest} digits"
    raise UnsupportedError(
        f"{option} {shown(text)}", f"it has to be a whole number{bound}", f"give for example {option} {example}"
    )


def positive(option: str, text: str, example: float) -> float:
    """The positive number that an option has; ``example`` is one, for the message.

    Raises:
        UnsupportedError: it is no number, not positive or infinite.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UnsupportedError(
            f"{option} {shown(text)}", "it has to be a positive number", f"give for example {option} {example}"
        )
    return value


def words(option: str, text: str) -> tuple[str, ...]:
    """The entries of a list that an option has, each once.

    Raises:
        UnsupportedError: one of them is empty.
    """
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if not all(found):
        raise UnsupportedError(
            f"{option} {shown(text)}",
            "it has to be a list separated by commas, without empty entries",
            "remove the extra comma, or the option",
        )
    return found
