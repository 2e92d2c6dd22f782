"""The child process of one compilation. Run as a file by ``compiler``; not imported.

It reads a request from standard input, compiles one kernel program, and writes ``plan.cubin`` and ``plan.ptx`` into its
working directory and a one-line JSON answer to standard output. Everything that the compiler prints goes to standard
error.

``cute.compile`` is not thread-safe, aborts the process on some faults, names its output after argument shapes only, and
reads CUTE_DSL_* variables that change what it generates. So each compilation has a process, a directory and an
environment of its own; the parent has removed those variables.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, so that a killed command leaves no compiler behind."""
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")


def main() -> None:
    request = json.load(sys.stdin)
    end_with(request["parent"])
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:] = request["sys_path"]

    import cutlass
    import cutlass.cute as cute

    module = importlib.import_module(request["module"])
    function, arguments = module.program(request["config"])
    compiled = cute.compile(function, *arguments, options=request["options"])
    with open("plan.cubin", "wb") as file:
        file.write(compiled.__cubin__)
    with open("plan.ptx", "w", encoding="ascii") as file:
        file.write(compiled.__ptx__)
    json.dump({"compiler": cutlass.__file__}, answer_to)
    answer_to.close()


if __name__ == "__main__":
    main()
