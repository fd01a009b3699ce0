"""Files of a batch job: rows in, records out, and what the output was made with.

An output is only ever appended to by whole lines, or by whole parts under a temporary name, so whatever stops a job
leaves at most one torn line, which is cut.
"""

import csv
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

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
        again, number = self.rows(), -1
        for number, values in enumerate(islice(again, len(todo))):
            row = Row(number, values, id_column)
            if hash_of(row.key) != hashes[number]:
                raise ConfigError(f"IN has changed while the job ran: row {number} has another id, {row.key!r:.100}.")
            if todo[number]:
                yield row
        if number + 1 < len(todo):
            raise ConfigError(f"IN has changed while the job ran: it held {len(todo):,} rows, now {number + 1:,}.")
        if next(again, None) is not None:
            print(f"IN has grown while the job ran; done are the {len(todo):,} rows that it held at the start.",
                  file=sys.stderr)  # fmt: skip


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
            size = file.seek(0, 2)
            digest.update(f"{size} ".encode())
            for start in range(0, size, 1 << 20) if num_bytes is None else (0, max(0, size - num_bytes)):
                file.seek(start)
                digest.update(file.read(num_bytes or 1 << 20))
    return digest.hexdigest()


# ---------------------------------------------------------------- out


@contextmanager
def every_second(function: Callable[[], Any]) -> Iterator[None]:
    """Call it once a second, on a thread; and at the end, once more. An error of the thread is raised at the end."""
    closing = Event()

    def repeat() -> None:
        while not closing.wait(1.0):
            function()

    with ThreadPoolExecutor(1) as pool:
        repeating = pool.submit(repeat)
        try:
            yield
        finally:
            closing.set()
            repeating.result()
            function()


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file that takes the path's place once it is whole and on disk."""
    temporary = path.with_name("." + path.name)
    with temporary.open("wb") as file:
        yield file
        sync(file)
    temporary.replace(path)
    sync_directory(path.parent)


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
        hashes, num_errors, position, num_kept, kept_end = array("Q"), 0, 0, 0, 0  # the last three in bytes
        for line, record in self._lines(retry_errors):
            position += len(line)
            if record is not None:
                hashes.append(hash_of(record["custom_id"]))
                num_errors += record.get("error") is not None
                num_kept, kept_end = num_kept + len(line), position
        if num_kept != kept_end:  # not only at the end
            with replacing(self.path) as file:
                file.writelines(line for line, record in self._lines(retry_errors) if record is not None)
        elif kept_end != position:
            os.truncate(self.path, kept_end)
        return hashes, num_errors

    def _lines(self, retry_errors: bool) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Each with its record if that is to be kept."""
        if self.path.exists():
            with self.path.open("rb") as lines:
                for line in lines:
                    record = read_line(line)
                    if isinstance(record, RequestError) or "custom_id" not in record or not line.endswith(b"\n"):
                        yield line, None
                    else:
                        yield line, None if retry_errors and record.get("error") else record

    @contextmanager
    def opened(self) -> Iterator[None]:
        with self.path.open("ab", buffering=0) as self._file:
            sync_directory(self.path.parent)
            with every_second(lambda: os.fsync(self._file.fileno())):
                yield

    def append(self, record: dict[str, Any]) -> None:
        try:
            line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
            line = json.dumps(record).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(f"{self.path}: a line was written in part; is the disk full?")


class ParquetOutput:
    """Parts, each written under a temporary name and renamed. What is nested is a column of JSON text."""

    COLUMNS = ("custom_id", "text", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens", "outputs",
               "prompt_logprobs", "response", "error")  # fmt: skip

    def __init__(self, path: Path, all_ids_are_integers: bool):
        self.path, self._parquet = path, import_parquet()
        self._id_type: type = int if all_ids_are_integers else str
        self._rows: list[dict[str, Any]] = []

    def is_begun(self) -> bool:
        return self.path.exists() and any(self.path.iterdir())

    def clear(self) -> None:
        for part in self.path.glob("part-*.parquet"):
            part.unlink()

    def scan(self, retry_errors: bool) -> tuple[array, int]:
        hashes, num_errors = array("Q"), 0
        for temporary in self.path.glob(".part-*"):
            temporary.unlink()
        for part in sorted(self.path.glob("part-*.parquet")):
            table = self._parquet.read_table(part, columns=["custom_id", "error"])
            if retry_errors and table["error"].null_count < len(table):
                self._write(self._parquet.read_table(part).filter(table["error"].is_null()), part)
                table = table.filter(table["error"].is_null())
            hashes.extend(map(hash_of, table["custom_id"].to_pylist()))
            num_errors += len(table) - table["error"].null_count
        return hashes, num_errors

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.path.mkdir(exist_ok=True)
        parts = [int(part.stem.removeprefix("part-")) for part in self.path.glob("part-*.parquet")]
        self._next, self._begun = max(parts, default=-1) + 1, monotonic()
        try:
            yield
        finally:
            self._flush()

    def append(self, record: dict[str, Any]) -> None:
        row = {name: x if isinstance(x, (str, int, type(None))) else json.dumps(x) for name, x in record.items()}
        stop = row.get("stop_reason")
        row["custom_id"], row["stop_reason"] = self._id_type(row["custom_id"]), None if stop is None else str(stop)
        self._rows.append(row)
        if len(self._rows) >= PART_ROWS or monotonic() - self._begun > PART_SECONDS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            import pyarrow

            integers = ("prompt_tokens", "completion_tokens", *(["custom_id"] if self._id_type is int else []))
            types = {name: pyarrow.int64() if name in integers else pyarrow.string() for name in self.COLUMNS}
            table = pyarrow.Table.from_pylist(self._rows, schema=pyarrow.schema(types))
            self._write(table, self.path / f"part-{self._next:06d}.parquet")
            self._next += 1
        self._rows, self._begun = [], monotonic()

    def _write(self, table: Any, part: Path) -> None:
        with replacing(part) as file:
            self._parquet.write_table(table, file)


def output_at(path: Path, all_ids_are_integers: bool) -> "JsonlOutput | ParquetOutput":
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


def sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """A renamed or new file survives a power failure only once its directory is on disk."""
    if os.name == "posix":
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class RunFile:
    """OUT.run.json: what OUT is made with; locked while a job writes to OUT."""

    def __init__(self, output: "JsonlOutput | ParquetOutput", overwrite: bool):
        self.output, self.overwrite = output, overwrite
        path = output.path.with_name(output.path.name + ".run.json")
        if output.is_begun() and not overwrite and not path.exists():
            raise ConfigError(f"{output.path} exists and is not of a batch job; give another OUT, or --overwrite.")
        self._file = path.open("a+", encoding="utf-8")
        try:
            lock(self._file.fileno())
        except OSError:
            self.close()
            raise ConfigError(f"another job is writing to {output.path}: it holds {path}.") from None
        if overwrite:
            output.clear()

    def close(self) -> None:
        self._file.close()

    def check(self, facts: dict[str, Any]) -> None:
        """Refuse to go on with an output that was begun with something else."""
        # Only then: a kill while they are written loses them. A directory may hold other files than it was rid of.
        if self.overwrite or not self.output.is_begun():
            return self.write(facts)
        self._file.seek(0)
        try:
            before = json.loads(self._file.read())
        except ValueError:
            raise ConfigError(f"{self._file.name} is damaged; give another OUT, or --overwrite.") from None
        facts = json.loads(json.dumps(facts))  # as it was read
        changed = [name for name in {**before, **facts} if before.get(name) != facts.get(name)]
        if changed and changed != ["model"]:  # the same files under another name are the same model
            lines = [f"  {name}: {before.get(name)!r:.200} then, {facts.get(name)!r:.200} now\n" for name in changed]
            raise ConfigError(
                f"{self.output.path} was begun with something else:\n{''.join(lines)}"
                "Give what was given then, or another OUT, or --overwrite."
            )

    def write(self, facts: dict[str, Any]) -> None:
        self._file.truncate(0)
        self._file.write(json.dumps(facts, indent=1))
        sync(self._file)


def lock(fd: int) -> None:
    """Until the file is closed or the process ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        os.lseek(fd, 1 << 30, os.SEEK_SET)  # a byte that nobody reads
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
