"""Which of the client's errors can pass by themselves, and how long to wait before the next try."""

from __future__ import annotations

import http.client
import json
import random

import pyarrow as pa
import urllib3
from odps import errors

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0

_PASSING = (
    errors.InternalServerError,
    errors.RequestQuotaExceeded,
    errors.ConnectTimeout,
    errors.WaitTimeoutError,
)
_BROKEN = (OSError, EOFError, urllib3.exceptions.HTTPError, http.client.HTTPException, pa.ArrowException, json.JSONDecodeError)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later: network faults, broken bodies, the service's own errors, exhausted quotas."""
    if isinstance(error, _PASSING):
        return True
    if isinstance(error, errors.BaseODPSError):
        status = getattr(error, "status_code", None)
        return status is not None and (status >= 500 or status == 429)
    return isinstance(error, _BROKEN)


def pause_s(failures: int) -> float:
    """How long to wait after so many failures in a row: doubling, and spread, so that many ranks don't come back at once."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16))
    return longest * random.uniform(0.5, 1.0)


def shown(error: BaseException) -> str:
    """An error in one line: its kind, the first line of its text, and the request that support can look up."""
    text = str(error.args[0] if error.args else error).strip().partition("\n")[0]
    request = getattr(error, "request_id", None)
    return type(error).__name__ + (f": {text}" if text else "") + (f" (request {request})" if request else "")
