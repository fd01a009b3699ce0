"""``python -m nanovllm.as_vllm script.py [args]`` or ``-m module [args]``: run it with nanovllm in vLLM's place."""

import os
import runpy
import sys

from nanovllm.as_vllm.modules import install

USAGE = """usage: python -m nanovllm.as_vllm script.py [args]
       python -m nanovllm.as_vllm -m module [args]

Runs a script written for vLLM with nanovllm in vLLM's place."""


def main(argv: list[str]) -> None:
    if not argv or argv in (["-m"], ["-h"], ["--help"]):
        sys.exit(USAGE)
    install()
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        if not os.path.exists(argv[0]):
            sys.exit(f"nanovllm.as_vllm: there is no script {argv[0]!r}.")
        sys.argv = argv
        sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
