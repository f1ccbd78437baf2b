"""From a URL to a store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from tidemill import registry
from tidemill.errors import ConfigError
from tidemill.storage.base import Storage


def open_storage(url: str | Path) -> Storage:
    """The store rooted at a path or URL.

    A plain path, `file://` and `local://` are folders of this machine; a scheme that is registered in the family "storage" is
    its backend; all others are fsspec's. Raises ConfigError for a URL that nobody knows, and MissingExtraError that says what to
    install for a driver that isn't there.
    """
    scheme, separator, _ = str(url).partition("://")
    if isinstance(url, Path) or not separator:
        return _backend("file", str(url))
    if scheme in ("file", "local"):
        return _backend("file", _local_path(str(url)))
    return _backend(scheme if scheme in registry.kinds("storage") else "fsspec", str(url))


def _backend(kind: str, location: str) -> Storage:
    storage: Storage = registry.resolve("storage", kind)(location)
    return storage


def _local_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigError(f"{url} doesn't name a folder of this machine: write file:///absolute/path, or a plain path")
    return unquote(parts.path)
