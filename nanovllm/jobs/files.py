"""Files of a batch job: rows in, records out, and what the output was made with.

An output is only ever appended to by whole lines, or by whole parts under a temporary name, so whatever stops a job
leaves at most one torn line, which is cut. Lines are not synced: those that a power failure takes, or leaves as zeros,
are done again.
"""

import csv
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import filelock
import numpy as np
import xxhash

from nanovllm.errors import ConfigError, RequestError
from nanovllm.jobs.rows import Row, hash_of

PART_ROWS, PART_SECONDS = 10_000, 60.0  # a part of parquet is written when either is reached


def import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("parquet needs pyarrow: pip install 'nanovllm[parquet]'.") from None
    return pyarrow.parquet


# ---------------------------------------------------------------- in


class Input:
    """The rows of a file, or of a directory's files in the order of their names."""

    def __init__(self, path: Path):
        self.files = sorted(f for f in path.iterdir() if f.suffix in READERS) if path.is_dir() else [path]
        if not self.files or self.files[0].suffix not in READERS:
            raise ConfigError(f"IN={path} must be a {', '.join(READERS)} file, or a directory that holds some.")

    def rows(self) -> Iterator[dict[str, Any] | RequestError]:
        """Each row, or why it cannot be read."""
        for file in self.files:
            try:
                yield from READERS[file.suffix](file)
            except (ValueError, csv.Error) as error:  # of decoding, and pyarrow's, are ValueErrors
                raise ConfigError(f"{file} cannot be read: {error}") from None

    def rows_to_do(self, todo: np.ndarray, hashes: array, id_column: str | None) -> Iterator[Row]:
        """The rows of bool ``todo`` [N], read again: the first N, whose ids' hashes these are.

        Raises:
            ConfigError: they are no longer the same.
        """
        num_rows = 0
        for number, values in enumerate(self.rows()):
            if number == len(todo):
                print(f"IN has grown while the job ran; done are the {number:,} rows that it held at the start.",
                      file=sys.stderr)  # fmt: skip
                return
            row, num_rows = Row(number, values, id_column), number + 1
            if hash_of(row.key) != hashes[number]:
                raise ConfigError(f"IN has changed while the job ran: row {number} has another id, {row.key!r:.100}.")
            if todo[number]:
                yield row
        if num_rows < len(todo):
            raise ConfigError(f"IN has changed while the job ran: it held {len(todo):,} rows, now {num_rows:,}.")


def read_jsonl(path: Path) -> Iterator[dict[str, Any] | RequestError]:
    with path.open("rb") as lines:
        yield from (read_line(line) for line in lines if line.strip())


def read_line(line: bytes) -> dict[str, Any] | RequestError:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return RequestError(f"the line is not JSON: {error}")
    return values if isinstance(values, dict) else RequestError(f"the line must hold an object, not {line[:100]!r}.")


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    for batch in import_parquet().ParquetFile(path).iter_batches(256):
        yield from map(without_nones, batch.to_pylist())


def without_nones(value: Any) -> Any:
    """Arrow gives every row all columns, and every struct all fields; a short line of CSV has None at its end."""
    if isinstance(value, dict):
        return {name: without_nones(x) for name, x in value.items() if x is not None}
    return [without_nones(x) for x in value] if isinstance(value, list) else value


def read_csv(path: Path) -> Iterator[dict[str, Any] | RequestError]:
    csv.field_size_limit(2**31 - 1)
    with path.open(newline="", encoding="utf-8-sig") as file:
        for values in csv.DictReader(file):
            yield RequestError("the row has more fields than the header.") if None in values else without_nones(values)


READERS: dict[str, Callable[[Path], Iterator]] = {".jsonl": read_jsonl, ".parquet": read_parquet, ".csv": read_csv}


def fingerprint(files: list[Path], num_bytes: int | None = None) -> str:
    """Hash of the files' contents, or of so many bytes at the beginning and end of each, and their sizes."""
    digest = xxhash.xxh3_64()
    for path in files:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{size} ".encode())
            for start in range(0, size, 1 << 20) if num_bytes is None else (0, max(0, size - num_bytes)):
                file.seek(start)
                digest.update(file.read(num_bytes or 1 << 20))
    return digest.hexdigest()


# ---------------------------------------------------------------- out


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file that takes the path's place once it is whole and on disk."""
    temporary = path.with_name("." + path.name)
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class JsonlOutput:
    """A line for each record."""

    def __init__(self, path: Path):
        self.path = path

    def is_begun(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def scan(self, retry_errors: bool) -> tuple[array, int]:
        """Hashes of the ids that are there, and how many are errors; damaged lines, and errors to retry, are cut."""
        hashes, num_errors, num_bytes = array("Q"), 0, 0
        for line, record in self._kept(retry_errors):
            hashes.append(hash_of(record["custom_id"]))
            num_errors += record.get("error") is not None
            num_bytes += len(line)
        if self.is_begun() and num_bytes < self.path.stat().st_size:
            with replacing(self.path) as file:
                file.writelines(line for line, _ in self._kept(retry_errors))
        return hashes, num_errors

    def _kept(self, retry_errors: bool) -> Iterator[tuple[bytes, dict[str, Any]]]:
        if self.path.exists():
            with self.path.open("rb") as lines:
                for line in lines:
                    record = read_line(line)
                    if isinstance(record, RequestError) or "custom_id" not in record or not line.endswith(b"\n"):
                        continue
                    if not (retry_errors and record.get("error")):
                        yield line, record

    @contextmanager
    def opened(self) -> Iterator[None]:
        with self.path.open("ab", buffering=0) as self._file:
            yield

    def append(self, record: dict[str, Any]) -> None:
        # half of a surrogate pair becomes \ud800, as JSON writes it
        line = json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(f"{self.path}: a line was written in part; is the disk full?")


class ParquetOutput:
    """Parts, each written under a temporary name and renamed. What is nested is a column of JSON text."""

    COLUMNS = ("custom_id", "text", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens", "outputs",
               "prompt_logprobs", "response", "error")  # fmt: skip

    def __init__(self, path: Path, all_ids_are_integers: bool):
        self.path, self._parquet = path, import_parquet()
        self._integers = {"prompt_tokens", "completion_tokens"} | ({"custom_id"} if all_ids_are_integers else set())
        self._rows: list[dict[str, Any]] = []

    def _parts(self) -> list[Path]:
        return sorted(self.path.glob("part-*.parquet"))

    def is_begun(self) -> bool:
        return self.path.exists() and any(self.path.iterdir())

    def clear(self) -> None:
        for part in self._parts():
            part.unlink()

    def scan(self, retry_errors: bool) -> tuple[array, int]:
        """The same of parts; temporary ones are dropped."""
        hashes, num_errors = array("Q"), 0
        for temporary in self.path.glob(".part-*"):
            temporary.unlink()
        for part in self._parts():
            table = self._parquet.read_table(part, columns=None if retry_errors else ["custom_id", "error"])
            if retry_errors and table["error"].null_count < len(table):
                table = table.filter(table["error"].is_null())
                self._write(table, part)
            hashes.extend(map(hash_of, table["custom_id"].to_pylist()))
            num_errors += len(table) - table["error"].null_count
        return hashes, num_errors

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.path.mkdir(exist_ok=True)
        self._begun = monotonic()
        try:
            yield
        finally:
            self._flush()

    def append(self, record: dict[str, Any]) -> None:
        self._rows.append({
            name: x if x is None or isinstance(x, str) or name in self._integers else json.dumps(x)
            for name, x in record.items()
        })  # fmt: skip
        if len(self._rows) >= PART_ROWS or monotonic() - self._begun > PART_SECONDS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            import pyarrow

            types = {name: pyarrow.int64() if name in self._integers else pyarrow.string() for name in self.COLUMNS}
            parts = self._parts()
            number = int(parts[-1].stem.removeprefix("part-")) + 1 if parts else 0
            table = pyarrow.Table.from_pylist(self._rows, schema=pyarrow.schema(types))
            self._write(table, self.path / f"part-{number:06d}.parquet")
        self._rows, self._begun = [], monotonic()

    def _write(self, table: Any, part: Path) -> None:
        with replacing(part) as file:
            self._parquet.write_table(table, file)


Output = JsonlOutput | ParquetOutput


def output_at(path: Path, all_ids_are_integers: bool) -> Output:
    if not path.parent.is_dir():
        raise ConfigError(f"OUT={path}: there is no directory {path.parent}.")
    if path.suffix == ".jsonl":
        return JsonlOutput(path)
    if path.suffix and not path.is_dir():
        raise ConfigError(f"OUT={path} must end in .jsonl, or be a directory, without a suffix, for parts of parquet.")
    return ParquetOutput(path, all_ids_are_integers)


def end_last_line(path: Path) -> None:
    """Make the file if there is none; end a line that a killed job left torn, lest the next is appended to it."""
    with path.open("ab") as file:
        if path.is_file() and file.tell():  # not a pipe
            with path.open("rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read() != b"\n":
                    file.write(b"\n")


@contextmanager
def begun(output: Output, overwrite: bool, facts_of: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Lock an output while a job writes to it. OUT.run.json remembers the facts that it is made with.

    Raises:
        ConfigError: another job writes to it, or it was begun with other facts.
    """
    run_file = output.path.with_name(output.path.name + ".run.json")
    if output.is_begun() and not overwrite and not run_file.exists():
        raise ConfigError(f"{output.path} exists and is not of a batch job; give another OUT, or --overwrite.")
    try:
        with filelock.FileLock(output.path.with_name(f".{output.path.name}.lock"), timeout=0):
            if overwrite:
                output.clear()
            facts = json.loads(json.dumps(facts_of()))  # as it is read
            if overwrite or not output.is_begun():  # a directory may hold other files than it was rid of
                with replacing(run_file) as file:
                    file.write(json.dumps(facts, indent=1).encode())
            else:
                check_unchanged(output.path, run_file, facts)
            yield
    except filelock.Timeout:
        raise ConfigError(f"another job is writing to {output.path}.") from None


def check_unchanged(path: Path, run_file: Path, facts: dict[str, Any]) -> None:
    try:
        before = json.loads(run_file.read_text())
    except ValueError:
        raise ConfigError(f"{run_file} is damaged; give another OUT, or --overwrite.") from None
    changed = [name for name in {**before, **facts} if before.get(name) != facts.get(name)]
    if changed and changed != ["model"]:  # the same files under another name are the same model
        lines = [f"  {name}: {before.get(name)!r:.200} then, {facts.get(name)!r:.200} now\n" for name in changed]
        raise ConfigError(
            f"{path} was begun with something else:\n{''.join(lines)}"
            "Give what was given then, or another OUT, or --overwrite."
        )
