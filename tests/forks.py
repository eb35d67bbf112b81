"""Runs pytest in fresh processes that need not import torch again.

As a program, this file imports what attnlab and its tests stand on, but nothing of theirs, and forks for every request.
A fork then imports attnlab and the tests from the folder that it was asked to run in.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

STOOD_ON = ("hypothesis.strategies", "matplotlib.pyplot", "pytest", "safetensors.torch", "torch", "triton.language")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "unshrunk")
OUTPUT = "output.txt"


class Forks:
    """A process to fork from: started once, then every `run` is a fresh `python -m pytest`."""

    def __init__(self) -> None:
        # Nothing but this file is on the path (-P), and no thread is there that a fork would leave behind (BLAS).
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, folder: Path, tests: list[str], *, seconds: int) -> tuple[int, str]:
        """Run tests in a folder; return what they printed and pytest's exit code, or minus the signal that ended them.

        What takes longer than so many seconds is ended by SIGALRM.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([str(folder), tests, seconds]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process to fork from has ended; its last words are among the errors printed above"
        return int(answer), (folder / OUTPUT).read_text(encoding="utf-8")

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate()


def _serve() -> None:
    """Answer every line of the input, a request, with a line: a fork's exit code."""
    for name in STOOD_ON:
        import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(folder: str, tests: list[str], seconds: int) -> None:
    """Do as `python -m pytest` in this folder does, and end the process."""
    import pytest

    code = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        os.chdir(folder)
        sys.path.insert(0, folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.alarm(seconds)
        code = int(pytest.main([*OPTIONS, *tests]))
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve()
