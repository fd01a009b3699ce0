"""Take one feature out of a copy of the library, and show that the rest stands.

    python tools/without.py speculation

Deletes the feature's files, its lines in the factories and its own tests; then runs ruff, mypy, and the CPU tests of
smoke, engine (with the scheduler) and equivalence. Exits with 1 where one of them fails. ``--keep`` prints the copy's
path and leaves it there.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FACTORIES = ("nanovllm/engine/variants.py", "nanovllm/runner/parts.py", "nanovllm/models/kinds.py", "nanovllm/llm.py")
CHECKS = ("tests/test_smoke.py", "tests/engine", "tests/test_equivalence.py")


class Feature(NamedTuple):
    files: tuple[str, ...]  # and folders, in ``nanovllm/``
    lines: str  # of the factories that match this expression
    tests: tuple[str, ...]  # its own, in ``tests/``


FEATURES = {
    "speculation": Feature(
        ("engine/speculation", "messages/verify.py", "runner/drafts.py"),
        r"SpeculativeScheduler|\bDrafts\b", ("test_speculation.py",),
    ),
    "hybrids": Feature(
        ("engine/hybrid", "messages/recurrent.py", "runner/recurrent.py", "models/recurrent/mixer.py",
         "models/recurrent/gated_delta_net", "models/recurrent/mamba2", "models/recurrent/short_conv",
         "kernels/gated_delta", "kernels/mamba2", "kernels/short_conv", "kernels/recurrent"),
        r"HybridBlockManager|RecurrentStates|gated_delta_net|short_conv|mamba2",
        ("test_hybrids.py", "engine/test_snapshots.py", "kernels/test_gated_delta.py", "kernels/test_mamba2.py",
         "kernels/test_short_conv.py", "kernels/chunks.py"),
    ),
    "gated_delta_net": Feature(
        ("models/recurrent/gated_delta_net", "kernels/gated_delta"), r"gated_delta_net",
        ("test_hybrids.py", "kernels/test_gated_delta.py"),
    ),
    "mamba2": Feature(
        ("models/recurrent/mamba2", "kernels/mamba2"), r"mamba2", ("test_hybrids.py", "kernels/test_mamba2.py"),
    ),
    "short_conv": Feature(
        ("models/recurrent/short_conv", "kernels/short_conv"), r"short_conv",
        ("test_hybrids.py", "kernels/test_short_conv.py"),
    ),
    "cascade": Feature(
        ("runner/cascade.py",), r"\bCascade\b", ("test_shared_prefixes.py", "runner/test_cascade.py"),
    ),
    "prompt_logprobs": Feature(
        ("readouts/prompt_logprobs.py", "runner/readers/prompt_logprobs.py", "verbs/scoring.py"),
        r"PromptLogprobs|read_prompt_logprobs|\bScoring\b", ("test_score.py",),
    ),
    "pooling": Feature(
        ("readouts/pooled_state.py", "runner/readers/pooled_state.py", "verbs/pooling.py",
         "verbs/sentence_transformers.py"),
        r"read_pooled_states|\bPooling\b", ("test_embed.py", "test_readouts.py"),
    ),
    "vision": Feature(
        ("engine/images", "messages/images.py", "models/vision.py", "models/vision_rules.py", "models/vision_tower.py",
         "models/towers", "runner/images.py", "runner/image_attention.py"),
        r"make_images|VisionPart",
        ("test_vision.py", "test_vision_api.py", "test_vision_clients.py", "test_vision_families.py",
         "test_vision_towers.py"),
    ),
    "transformers_backend": Feature(
        ("transformers_backend",), r"transformers_backend", ("test_transformers_backend.py",),
    ),
    "prefix_copies": Feature(
        ("engine/prefix_copies.py", "runner/prefix_copies.py"),
        r"CopyingBlockManager|PrefixCopies", ("engine/test_prefix_copies.py",),
    ),
}  # fmt: skip


def copy_without(feature: Feature, to: Path) -> int:
    """Copy the working tree without the feature; returns how many lines of the library are gone."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    before = num_lines(to)
    for name in (*(f"nanovllm/{name}" for name in feature.files), *(f"tests/{name}" for name in feature.tests)):
        path = to / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in FACTORIES:
        lines = (to / name).read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if not re.search(feature.lines, line)]
        (to / name).write_text("".join(kept), encoding="utf-8")
    return before - num_lines(to)


def num_lines(root: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (root / "nanovllm").rglob("*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("feature", choices=FEATURES)
    parser.add_argument("--keep", action="store_true", help="leave the copy, and print its path")
    parser.add_argument("tests", nargs="*", default=CHECKS, help=f"default: {' '.join(CHECKS)}")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix=f"nanovllm-without-{args.feature}-"))
    environment = {**os.environ, "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache")}  # to check torch anew takes mypy 20 s
    try:
        gone = copy_without(FEATURES[args.feature], directory)
        print(f"without {args.feature}: {gone:,} lines of the library are gone", flush=True)
        for command in (["ruff", "check", "."], ["mypy"], ["pytest", "-q", *args.tests]):
            subprocess.run([sys.executable, "-m", *command], cwd=directory, check=True, env=environment)
    except subprocess.CalledProcessError as error:
        sys.exit(f"without {args.feature}: {' '.join(error.cmd[2:])} failed")
    finally:
        if args.keep:
            print(directory)
        else:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
