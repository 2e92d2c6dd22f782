"""The child process of one compilation. Run as a file by ``compiler``; not imported.

It reads a request from standard input, compiles one kernel program, and writes ``plan.cubin`` and ``plan.ptx`` into its
working directory and a one-line JSON answer to standard output. Everything that the compiler prints goes to standard
error.

``cute.compile`` is not thread-safe, aborts the process on some faults, names its output after argument shapes only, and
reads CUTE_DSL_* variables that change what it generates. So each compilation has a process, a directory and an
environment of its own; the parent has removed those variables.

ptxas numbers some registers in the order of addresses (default for sm_100f at topk 128 came out in two ways), so the
process runs without address space randomisation: builds by one installation agree. Where that is forbidden, as in
containers with Docker's default seccomp profile, and between installations in different folders, such a plan may differ
in those numbers.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
ADDR_NO_RANDOMIZE = 0x0040000  # linux/personality.h
QUERY = 0xFFFFFFFF


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, so that a killed command leaves no compiler behind."""
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")


def stop_randomisation() -> None:
    """Start again at the addresses that every run has."""
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        libc = ctypes.CDLL(None)
        now = libc.personality(QUERY)
        if now != -1 and not now & ADDR_NO_RANDOMIZE and libc.personality(now | ADDR_NO_RANDOMIZE) != -1:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main() -> None:
    stop_randomisation()
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
