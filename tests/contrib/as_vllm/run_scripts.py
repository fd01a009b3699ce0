"""Runs scripts one after another as ``python -m nanovllm.as_vllm`` would; prints their errors as JSON."""

import contextlib
import gc
import json
import sys
import time
import traceback
from pathlib import Path

from nanovllm.contrib.as_vllm.__main__ import main

SCRIPTS = Path(__file__).parent / "scripts"


def run(name: str, model: str) -> str:
    """The traceback; empty if it ran to its end."""
    try:
        main([str(SCRIPTS / f"{name}.py"), model])
    except BaseException:
        return traceback.format_exc()
    finally:
        gc.collect()
        gc.freeze()  # modules stay: each engine's start would walk them again, for 0.3 s
    return ""


if __name__ == "__main__":
    model, *names = sys.argv[1:]
    errors, seconds = {}, {}
    with contextlib.redirect_stdout(sys.stderr):
        for name in names:
            begin = time.perf_counter()
            errors[name] = run(name, model)
            seconds[name] = round(time.perf_counter() - begin, 2)
    print(json.dumps({"errors": errors, "seconds": seconds}))
