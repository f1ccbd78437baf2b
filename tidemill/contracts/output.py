"""What `tidemill predict` leaves behind."""

from __future__ import annotations

from typing import ClassVar

from tidemill.contracts.base import Document
from tidemill.contracts.files import FileEntry


class OutputManifest(Document):
    """`_SUCCESS`, written last: an output folder is whole if and only if it is there. `files`: in the order of the rows."""

    schema_name: ClassVar[str] = "output"

    rows: int
    files: list[FileEntry]
