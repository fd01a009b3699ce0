# /// script
# requires-python = ">=3.10"
# dependencies = ["nanovllm", "matplotlib>=3.8"]
# tool.uv.sources.nanovllm = { path = "..", editable = true }
# ///
"""A job over a file, stopped in the middle and taken up again; then its metrics as a page, by matplotlib.

The same at a prompt, for the second part: nanovllm batch questions.jsonl answers.jsonl --chat --temperature 0
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NANOVLLM = [sys.executable, "-m", "nanovllm"]

with tempfile.TemporaryDirectory() as directory:
    questions, answers, metrics, page = (
        Path(directory, name) for name in ("questions.jsonl", "answers.jsonl", "metrics.jsonl", "page.html")
    )
    with questions.open("w") as file:
        for i in range(120):
            file.write(json.dumps({"id": i, "prompt": f"{i % 60} + {i % 7}"}) + "\n")
    command = [*NANOVLLM, "batch", questions, answers, "--chat", "--temperature", "0", "--max-num-seqs", "4",
               "--metrics", metrics]  # fmt: skip

    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while job.poll() is None and not (answers.exists() and answers.stat().st_size > 0):
        time.sleep(0.01)
    job.send_signal(signal.SIGKILL)
    _, messages = job.communicate()
    if not answers.exists():
        sys.exit(f"the job failed:\n{messages}")
    print(f"killed; {len(answers.read_bytes().splitlines())} rows are there")

    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in answers.open()]
    print(f"taken up again; {len(rows)} rows, {len({row['custom_id'] for row in rows})} different")
    print(f"one of them: {next(row for row in rows if row['custom_id'] == 12)}")
    subprocess.run([*NANOVLLM, "plot", metrics, page], check=True)
    print(f"metrics drawn: {page.stat().st_size // 1024} KiB of HTML")
