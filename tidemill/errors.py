"""Every error that tidemill raises on purpose.

    TidemillError                  exit 1
    +-- ConfigError                exit 2    the config or the command line is wrong; names file, line, key
    +-- DataError                  exit 65   rows or messages that can't be read as declared
    |   +-- SchemaError            exit 65   a needed column is missing, or has another type
    |   +-- SourceChangedError     exit 65   a split isn't what it was when it was first read (size, rows, offsets)
    +-- StorageError               exit 74   retry: the store failed
    |   +-- NotFoundError          exit 66   the object isn't there
    |   +-- AlreadyExistsError     exit 73   exclusive create lost
    |   +-- CorruptError           exit 65   bytes differ from what their manifest says
    |   +-- UnsafeStoreError       exit 78   the store can't create exclusively, so it can't be a lineage root
    +-- CheckpointError            exit 66   no usable checkpoint, or one that doesn't fit the model
    +-- PublishError               exit 74   a release can't be written or fails its gate
    +-- LineageError               exit 73
    |   +-- FencedError            exit 76   a newer term writes this lineage
    |   +-- RetiredError           exit 77   the lineage has retired and never starts again
    +-- PeerLostError              exit 75   retry: another rank is gone, or failed
    +-- DeadlineError              exit 75   retry: a wait ran past its deadline
    +-- ServingError               exit 70
    |   +-- RequestError           -         the request is wrong; names feature, row, expected type (HTTP 400)
    |   +-- NotReadyError          -         nothing to serve yet (HTTP 503)
    +-- MissingExtraError          exit 69   an optional package isn't installed; says what to install

`exit_code` is what a process that ends with the error returns; `retryable` says whether the same call can succeed later.
"""

from __future__ import annotations

from typing import ClassVar


class TidemillError(Exception):
    """Root of all errors raised on purpose."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False


class ConfigError(TidemillError):
    exit_code = 2


class DataError(TidemillError):
    exit_code = 65


class SchemaError(DataError):
    pass


class SourceChangedError(DataError):
    pass


class StorageError(TidemillError):
    exit_code = 74
    retryable = True


class NotFoundError(StorageError):
    exit_code = 66
    retryable = False


class AlreadyExistsError(StorageError):
    exit_code = 73
    retryable = False


class CorruptError(StorageError):
    exit_code = 65
    retryable = False


class UnsafeStoreError(StorageError):
    exit_code = 78
    retryable = False


class CheckpointError(TidemillError):
    exit_code = 66


class PublishError(TidemillError):
    exit_code = 74
    retryable = True


class LineageError(TidemillError):
    exit_code = 73


class FencedError(LineageError):
    exit_code = 76


class RetiredError(LineageError):
    exit_code = 77


class PeerLostError(TidemillError):
    exit_code = 75
    retryable = True


class DeadlineError(TidemillError):
    exit_code = 75
    retryable = True


class ServingError(TidemillError):
    exit_code = 70


class RequestError(ServingError):
    pass


class NotReadyError(ServingError):
    retryable = True


class MissingExtraError(TidemillError):
    exit_code = 69
