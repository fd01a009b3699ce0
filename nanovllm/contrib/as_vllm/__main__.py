"""Run a script written for vLLM with nanovllm in vLLM's place.

usage: python -m nanovllm.as_vllm script.py [args]
       python -m nanovllm.as_vllm -m module [args]
"""

import os
import runpy
import sys

from nanovllm.contrib.as_vllm.modules import install


def main(argv: list[str]) -> None:
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if not argv or argv == ["-m"]:
        sys.exit(__doc__)
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        install()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif os.path.exists(argv[0]):
        sys.argv, sys.path[0] = argv, os.path.dirname(os.path.abspath(argv[0]))
        install()  # after the change of the path, which may have lost nanovllm
        runpy.run_path(argv[0], run_name="__main__")
    else:
        sys.exit(f"nanovllm.as_vllm: there is no script {argv[0]!r}.")


if __name__ == "__main__":
    main(sys.argv[1:])
