"""Which of the client's errors can pass by themselves."""

from __future__ import annotations

import http.client
import json

import pyarrow as pa
import urllib3
from odps import errors

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


def shown(error: BaseException) -> str:
    """An error in one line: its kind, the first line of its text, and the request that support can look up."""
    text = str(error.args[0] if error.args else error).strip().partition("\n")[0]
    request = getattr(error, "request_id", None)
    return type(error).__name__ + (f": {text}" if text else "") + (f" (request {request})" if request else "")
