"""Runs scripts one after another in one process, for their imports take the time; prints what they did as JSON.

    python tests/run_scripts.py FOLDER NAME...              # each as a program of its own
    python tests/run_scripts.py --as-vllm FOLDER NAME...    # as `python -m nanovllm.as_vllm` would, on the demo model
"""

import contextlib
import gc
import io
import json
import runpy
import sys
import traceback


def run(path: str, as_vllm: bool) -> dict[str, str]:
    """Its output, and its traceback: empty if it ran to its end."""
    error = ""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            if as_vllm:
                from nanovllm.contrib.as_vllm.__main__ import main
                from nanovllm.utils.checkpoint import DEMO_MODEL

                main([path, str(DEMO_MODEL)])
            else:
                runpy.run_path(path, run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
    gc.collect()
    gc.freeze()  # modules stay: each engine's start would walk them again, for 0.3 s
    return {"output": output.getvalue(), "error": error}


if __name__ == "__main__":
    as_vllm = sys.argv[1] == "--as-vllm"
    folder, *names = sys.argv[1 + as_vllm :]
    print(json.dumps({name: run(f"{folder}/{name}.py", as_vllm) for name in names}))
