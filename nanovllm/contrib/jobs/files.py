"""Files of a batch job: rows in, records out, and the facts that an output was made with.

An output only grows by whole lines or whole parts, so whatever stops a job leaves at most one torn line, which is cut.
Lines are not synced: those that a power failure takes, or leaves as zeros, are done again. fsspec opens URLs, and
pyarrow reads parquet alone: its reader of CSV closes an open quote itself, that of JSON wants one type in a column.
"""

import csv
import io
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from itertools import count, filterfalse, islice
from pathlib import Path, PurePosixPath
from time import monotonic
from typing import Any

import filelock
import numpy as np
import xxhash

from nanovllm.contrib.jobs.rows import IMAGES, Row, end_of, hash_of, row_of
from nanovllm.errors import ConfigError, NanoVLLMError, RequestError

with suppress(ImportError):  # Windows
    import fcntl

PART_ROWS, PART_SECONDS = 10_000, 60.0  # a part of parquet is written when either is reached
ANSWER_COLUMNS = ("text", "reasoning", "content", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens",
                  "outputs", "prompt_logprobs", "response", "error")  # parquet columns
ANNOTATIONS = {"title", "description", "default", "examples", "$comment"}  # JSON schema keywords that allow all values
CHUNK = 1 << 18  # bytes
# pieces of a large file in its fingerprint: a change of 21 MiB in a row, as of a layer's weight, of 5 GiB meets one
NUM_PIECES, PIECE_BYTES = 256, 16 << 10
Values = dict[str, Any] | RequestError  # values of a row, or the reason why it cannot be read


class RemoteFile:
    """A file of an fsspec filesystem, with the methods of ``Path`` that an input needs."""

    def __init__(self, filesystem: Any, info: dict[str, Any]):
        self._filesystem, self._info, self._path = filesystem, info, info["name"]
        path = PurePosixPath(self._path.partition("?")[0])  # a signature may follow
        self.name, self.suffix = path.name, path.suffix

    @cached_property
    def size(self) -> int:
        """When the job began, in bytes; 0 where a server does not tell it."""
        return self._info.get("size") or self._filesystem.size(self._path) or 0  # lists of some servers lack it

    def __str__(self) -> str:
        return self._filesystem.unstrip_protocol(self._path)

    def exists(self) -> bool:
        return True

    def is_file(self) -> bool:
        return self._info["type"] != "directory"

    def open(self, mode: str = "r", **options: Any) -> Any:
        # fsspec's own files read a block of 5 MiB for every line
        file = io.BufferedReader(self._filesystem.open(self._path, "rb"), CHUNK)
        return file if mode == "rb" else io.TextIOWrapper(file, **options)


File = Path | RemoteFile


def read_jsonl(path: File) -> Iterator[Values]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"line {number} of {path.name}"
            try:
                values = json.loads(line)
                is_object = isinstance(values, dict)
                yield values if is_object else RequestError(f"{where} must hold an object, not {line[:100]!r}.")
            except json.JSONDecodeError as error:
                yield RequestError(f"{where} is not JSON: {error.msg}, at column {error.colno}.")
            except (ValueError, RecursionError) as error:
                yield RequestError(f"{where} is not JSON: {error}")


def read_csv(path: File) -> Iterator[Values]:
    csv.field_size_limit(2**31 - 1)
    end = 0  # line of the last row, or of the header
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            require_distinct(path, rows.fieldnames or ())
            end = rows.line_num if rows.fieldnames else 0
            for values in rows:
                end = rows.line_num
                if None in values:
                    yield RequestError(f"line {end} of {path.name} has more fields than the header.")
                else:
                    yield without_nones(values)
        except csv.Error as error:
            raise ConfigError(f"{path} cannot be read: the row from line {end + 1} on has a quote that is not closed, "
                              f"or not doubled within a text ({error}).") from None  # fmt: skip


def read_parquet(path: File) -> Iterator[Values]:
    with path.open("rb") as file:
        parquet = import_parquet().ParquetFile(file)
        require_distinct(path, parquet.schema_arrow.names)
        for batch in parquet.iter_batches(256):
            for values in batch.to_pylist():
                for name, value in values.items():
                    try:
                        values[name] = without_nones(value)
                    except RequestError as error:
                        values[name] = RequestError(f"{name!r}: {error}")
                # an image's null stays: a column without one image is a column of images
                yield {name: value for name, value in values.items() if value is not None or name in IMAGES}


def require_distinct(path: File, columns: Sequence[str]) -> None:
    """Raise ConfigError where two columns have one name: a row would have the last one's value alone."""
    if repeated := [name for name, num in Counter(columns).items() if num > 1]:
        raise ConfigError(f"{path} has several columns named {repeated[0]!r:.100}; give each a name of its own.")


def without_nones(value: Any) -> Any:
    """Arrow gives every row all columns, and every struct all fields; a short line of CSV has None at its end.

    Raises:
        RequestError: a JSON schema means another thing with and without a null. In others a null means nothing.
    """
    if isinstance(value, dict):
        kept = {name: without_nones(x) for name, x in value.items() if x is not None}
        is_const = "const" in value and kept.keys() <= ANNOTATIONS
        if is_const or any(kept[name] != value[name] for name in ("const", "enum") if name in kept):
            raise RequestError(f"{value!r:.200} may hold a null, or fields that are absent: Arrow keeps both as null. "
                               "Give the JSON schema as text.")  # fmt: skip
        return kept
    return [without_nones(x) for x in value] if isinstance(value, list) else value


def import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("parquet needs pyarrow: pip install '.[parquet]' in the checkout.") from None
    return pyarrow.parquet


def read(path: File, remedy: str = "") -> Iterator[Any]:
    """The values of each row of a file; raises ConfigError with the remedy where it is damaged."""
    with reading(path, remedy):
        yield from READERS[path.suffix](path)


@contextmanager
def reading(path: Any, remedy: str = "") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # decoding, network and pyarrow errors; pyarrow's OSErrors have no number
        if isinstance(error, NanoVLLMError) or getattr(error, "errno", None) is not None:
            raise
        kind = f"{type(error).__name__}: " if isinstance(error, OSError) else ""  # its text may be the path alone
        raise ConfigError(f"{path} cannot be read: {kind}{error}{remedy}") from None


READERS: dict[str, Callable[[File], Iterator]] = {".jsonl": read_jsonl, ".parquet": read_parquet, ".csv": read_csv}


# ---------------------------------------------------------------- in


def located(location: str) -> tuple[Any, str]:
    """The filesystem of a URL, None for the local one, and the path in it."""
    if "://" not in location:
        return None, location
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(location)
        is_local = isinstance(filesystem, fsspec.get_filesystem_class("file"))
    except ImportError as error:
        raise ConfigError(
            f"IN={location} needs a package that is missing: pip install '.[remote]' in the checkout ({error})."
        ) from None
    except Exception as error:
        raise ConfigError(f"IN={location} cannot be opened: {error}") from None
    return None if is_local else filesystem, path


def files_of(location: str) -> list[File]:
    """The file that IN names, or the files of a directory or of a pattern, sorted by name."""
    filesystem, path = located(location)
    files: list[File]
    if filesystem is None:
        if "*" in path and not Path(path).exists():
            raise ConfigError(f"IN={location}: patterns of local files are not read; give a directory that holds some.")
        files = [*sorted(Path(path).iterdir())] if Path(path).is_dir() else [Path(path)]
    else:
        with reading(f"IN={location}"):
            infos = filesystem.glob(path, detail=True).values() if "*" in path else [filesystem.info(path)]
            if [info["type"] for info in infos] == ["directory"]:
                infos = filesystem.ls(path, detail=True)
        files = [RemoteFile(filesystem, info) for info in sorted(infos, key=lambda info: info["name"])]
    if not (known := [file for file in files if file.suffix in READERS]):
        there = f" It holds: {', '.join(file.name for file in files):.200}." if len(files) > 1 else ""
        raise ConfigError(f"IN={location} must be a {', '.join(READERS)} file, or a directory that holds some.{there}")
    if special := [file for file in known if file.exists() and not file.is_file()]:
        raise ConfigError(f"IN={special[0]} is a folder or a pipe; it must be a file, for it is read twice.")
    return known


class Input:
    """The rows of a file, or of a directory's files in the order of their names; a path or a URL of fsspec.

    Attributes:
        hashes: of the rows' ids, uint64 [N]: all that is kept of a row.
        columns: of any row.
        id_names: of the columns that ids are from.
        ids_are_integers: whether all ids are 64-bit integers.
    """

    def __init__(self, path: str | Path, id_column: str | None):
        self.files = files_of(str(path))
        self._id_column = id_column
        hashes, columns, self.ids_are_integers = array("Q"), dict[str, None](), True
        self.id_names = set[str]()
        for row in self.rows():
            hashes.append(hash_of(row.key))
            columns.update(dict.fromkeys(row.values))
            self.id_names.add(row.name)
            self.ids_are_integers &= isinstance(row.key, int) and -(2**63) <= row.key < 2**63
        if not hashes:
            raise ConfigError(f"IN={path} holds no rows.")
        self.hashes, self.columns = np.frombuffer(hashes, np.uint64), list(columns)
        _, first_at = np.unique(self.hashes, return_index=True)
        if num_repeated := len(hashes) - len(first_at):
            repeated = np.delete(np.arange(len(hashes)), first_at)[0]
            first, second, *_ = np.flatnonzero(self.hashes == hashes[repeated]).tolist()
            key = next(islice(self.rows(), second, None)).key
            raise ConfigError(
                f"IN={path}: rows {first} and {second} (counted from 0) have the same id {key!r}. Rows "
                f"that repeat an id: {num_repeated:,}. Make the ids unique, or name another --id-column."
            )

    def rows(self) -> Iterator[Row]:
        numbers = count()
        for file in self.files:
            for values in read(file):
                yield row_of(values, next(numbers), self._id_column)

    def rows_to_do(self, todo: np.ndarray) -> Iterator[Row]:
        """The rows of bool ``todo`` [N], read again up to the last; raises ConfigError if they are no longer the same.
        """
        num_rows, end = 0, int(np.flatnonzero(todo).max(initial=-1)) + 1
        for row, known, is_to_do in zip(self.rows(), self.hashes, todo[:end], strict=False):
            if hash_of(row.key) != known:
                raise ConfigError(f"IN has changed while the job ran: row {num_rows} has another id, {row.key!r:.100}.")
            num_rows += 1
            if is_to_do:
                yield row
            if num_rows == end:
                return  # the rest need not be read
        if num_rows < end:
            raise ConfigError(f"IN has changed while the job ran: it held {len(todo):,} rows, now {num_rows:,}.")

    def num_bytes(self) -> int:
        return sum(size_of(file) for file in self.files)


def size_of(file: File) -> int:
    return file.size if isinstance(file, RemoteFile) else file.stat().st_size


def fingerprint(files: Sequence[File], max_bytes: int | None = None) -> str:
    """Hash the files' sizes and contents; a file larger than ``max_bytes`` is sampled by pieces spread evenly over it.
    """
    digest = xxhash.xxh3_64()
    for path in files:
        with reading(path), path.open("rb") as file:
            size = size_of(path)
            digest.update(f"{size} ".encode())
            if max_bytes is None or size <= max_bytes:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
            else:
                for piece in range(NUM_PIECES):  # the first and the last are the file's two ends
                    file.seek(piece * (size - PIECE_BYTES) // (NUM_PIECES - 1))
                    digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


# ---------------------------------------------------------------- out


class Output:
    """Records: lines of a .jsonl file, or parts of parquet in a directory, where nested values are JSON text."""

    def __init__(self, path: Path, ids_are_integers: bool, id_names: Iterable[str] = ()):
        self.path, self.is_parquet = path, path.suffix != ".jsonl"
        if not path.parent.is_dir():
            raise ConfigError(f"OUT={path}: there is no directory {path.parent}.")
        if self.is_parquet and path.suffix and not path.is_dir():
            raise ConfigError(
                f"OUT={path} must end in .jsonl, or be a directory, without a suffix, for parts of parquet."
            )
        if self.is_parquet:
            import_parquet()
        elif path.exists() and not path.is_file():
            raise ConfigError(f"OUT={path} is a folder or a pipe; it must be a file, for a job that goes on reads it.")
        id_names = {"custom_id", *id_names} - {*ANSWER_COLUMNS}
        self._columns = *sorted(id_names), *ANSWER_COLUMNS
        self._integers = {"prompt_tokens", "completion_tokens"} | (id_names if ids_are_integers else set())
        self.num_written = 0  # rows that this job has handed to the operating system
        self._rows: list[dict[str, Any]] = []  # rows of the part that is written next
        self._flushed_at = monotonic()

    def files(self) -> list[Path]:
        """The files that hold something."""
        files = sorted(self.path.glob("part-*.parquet")) if self.is_parquet else [self.path]
        return [file for file in files if file.exists() and file.stat().st_size]

    def written(self) -> set[Path]:
        """The files that the job writes, links followed."""
        beside = (self.path.resolve(), *beside_output(self.path))
        return {path.resolve() for path in (*self.files(), *beside, *map(temporary_of, beside))}

    def records(self, hashes: Container[int]) -> Iterator[dict[str, Any]]:
        """The records of rows with ids of these hashes."""
        for file in self.files():
            yield from (record for record in read(file) if hash_of(record["custom_id"]) in hashes)

    def scan(self, retry_errors: bool, mine: Container[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Hashes of the ids that are there, and how each ended, see ``end_of``; damaged lines, and errors to retry, are
        cut. ``mine``: hashes of the rows whose errors may be, None for all.
        """
        hashes, ends = array("Q"), array("B")

        def is_cut(record: Any) -> bool:
            if not (isinstance(record, dict) and "custom_id" in record):
                return True
            is_retried = retry_errors and record.get("error") is not None
            return is_retried and (mine is None or hash_of(record["custom_id"]) in mine)

        for file in self.files():
            num_cut = 0
            if not self.is_parquet:
                end_last_line(file)
            for record in read(file, " Without this file its rows are done again."):
                if is_cut(record):
                    num_cut += 1
                else:
                    hashes.append(hash_of(record["custom_id"]))
                    ends.append(end_of(record))
            if num_cut:
                with replacing(file) as new:
                    self.write_records(filterfalse(is_cut, read(file)), new)
        return np.frombuffer(hashes, np.uint64), np.frombuffer(ends, np.uint8)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the file itself, which may have other names by hard links; raises filelock.Timeout."""
        with nullcontext() if self.is_parquet or os.name == "nt" else self.path.open("ab") as file:
            try:
                if file is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise filelock.Timeout(str(self.path)) from None
            yield

    @contextmanager
    def opened(self) -> Iterator[None]:
        if self.is_parquet:
            self.path.resolve().mkdir(exist_ok=True)  # a link may point to nothing
        self._file = None if self.is_parquet else self.path.open("ab")
        try:
            yield
        finally:
            with naming(self.path), nullcontext() if self._file is None else self._file:  # closing writes, too
                self._flush()

    def append(self, record: dict[str, Any]) -> None:
        self._rows.append(record)
        if not self.is_parquet or len(self._rows) >= PART_ROWS or monotonic() - self._flushed_at > PART_SECONDS:
            self._flush()

    def _flush(self) -> None:
        rows, self._rows, self._flushed_at = self._rows, [], monotonic()
        with naming(self.path):
            if self._file is not None:
                self.write_records(rows, self._file)
                self._file.flush()
            elif rows:
                parts = self.files()
                number = int(parts[-1].stem.removeprefix("part-")) + 1 if parts else 0
                with replacing(self.path / f"part-{number:06d}.parquet") as part:
                    self.write_records(rows, part)
        self.num_written += len(rows)

    def write_records(self, records: Iterable[dict[str, Any]], file: Any) -> None:
        if not self.is_parquet:
            for record in records:  # half of a surrogate pair becomes \ud800, as JSON writes it
                file.write(json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
            return
        import pyarrow

        types = {name: pyarrow.int64() if name in self._integers else pyarrow.string() for name in self._columns}

        def as_text(x: Any) -> str:  # half of a surrogate pair is no UTF-8
            return x.encode(errors="backslashreplace").decode() if isinstance(x, str) else json.dumps(x)

        rows = [
            {k: x if x is None or k in self._integers else as_text(x) for k, x in row.items()} for row in records
        ]
        import_parquet().write_table(pyarrow.Table.from_pylist(rows, pyarrow.schema(types)), file)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of writes, such as a full disk, the name of the file, which they lack."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file that takes the path's place once it is whole and on disk; where that is a link, its target's place."""
    path = path.resolve()
    temporary = temporary_of(path)
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def temporary_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")  # no suffix that an input has


def end_last_line(path: Path) -> None:
    """Make the file if there is none; end a line that a killed job left torn, lest the next is appended to it."""
    with path.open("ab") as file:
        if path.is_file() and file.tell():  # not a pipe
            with path.open("rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read() != b"\n":
                    file.write(b"\n")


# ---------------------------------------------------------------- what it was made with


def beside_output(path: Path) -> tuple[Path, Path]:
    """OUT.run.json and the lock: one for all links to an output."""
    path = path.resolve()
    return path.with_name(path.name + ".run.json"), path.with_name(f".{path.name}.lock")


@contextmanager
def begun(output: Output, facts: dict[str, Any], overwrite: bool) -> Iterator[None]:
    """Lock an output while a job writes to it. OUT.run.json remembers the facts that it is made with."""
    path, (run_file, lock) = output.path, beside_output(output.path)
    facts = json.loads(json.dumps(facts))  # as it is read
    try:
        with filelock.FileLock(lock, timeout=0), output.held():
            if overwrite:
                for file in output.files():
                    file.unlink()
            if output.files():
                check_unchanged(path, run_file, facts)
            else:
                with replacing(run_file) as new:
                    new.write(json.dumps(facts, indent=1).encode())
            yield
    except filelock.Timeout:
        raise ConfigError(f"another job is writing to {path}.") from None


def check_unchanged(path: Path, run_file: Path, facts: dict[str, Any]) -> None:
    if not run_file.exists():
        raise ConfigError(f"{path} exists and is not of a batch job; give another OUT, or --overwrite.")
    before = None
    with suppress(ValueError, RecursionError):
        before = json.loads(run_file.read_bytes())
    if not isinstance(before, dict):
        raise ConfigError(f"{run_file} is damaged; give another OUT, or --overwrite.")
    changed = [name for name in {**before, **facts} if before.get(name) != facts.get(name)]
    if changed and changed != ["model"]:  # the same files under another name are the same model
        lines = [f"  {name}: {before.get(name)!r:.200} then, {facts.get(name)!r:.200} now\n" for name in changed]
        raise ConfigError(
            f"{path} was begun with something else:\n{''.join(lines)}"
            "Give what was given then, or another OUT, or --overwrite."
        )
