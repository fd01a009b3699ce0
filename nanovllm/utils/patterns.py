"""Matches the regular expressions of a checkpoint's files, which are strangers', within a time limit.

Owns the process that they run in: backtracking may take for ever, inside one call that no thread can end.
"""

import json
import sys

SECONDS = 10.0  # limit for all patterns of a file; thousands of names take a fraction of a second
PROGRAM = """
import json, re, sys
patterns, names, method, group = json.load(sys.stdin)
found, compiled = {}, []
for given, pattern in patterns.items():
    try:
        compiled.append((given, re.compile(pattern)))
    except (re.error, OverflowError, RecursionError) as error:
        sys.exit(f"the regular expression {given!r:.100} ({error})")
for name in names:
    for given, pattern in compiled:
        if match := getattr(pattern, method)(name):
            found[name] = match[group] if group else given
            break
json.dump(found, sys.stdout)
"""


def first_matches(patterns: dict[str, str], names: list[str], method: str = "match", group: str = "") -> dict[str, str]:
    """The first pattern that matches a name's beginning, for names that have one.

    Args:
        patterns: as they were given -> regular expression.
        method: "fullmatch" matches whole names.
        group: named group of the patterns; its text is returned in place of the pattern.

    Raises:
        ValueError: one is no regular expression, or they take too long.
    """
    if not (patterns and names):
        return {}
    import subprocess  # takes 3 ms, and only files with patterns need it

    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", PROGRAM], input=json.dumps([patterns, names, method, group]),
            text=True, capture_output=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ValueError(f"regular expressions that take more than {SECONDS:g} s to match") from None
    if done.returncode:
        raise ValueError(done.stderr.strip()[-300:])
    return json.loads(done.stdout)
