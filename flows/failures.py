"""Failures of the machine that a person can repair: a full disk, a folder that must not be written."""

import errno
from collections.abc import Iterator

EXPLAINED = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
}
# Libraries written in other languages report the operating system's error as text alone.
_TEXTS = {"No space left on device": errno.ENOSPC, "os error 28": errno.ENOSPC, "disk is full": errno.ENOSPC}


def repairable(error: BaseException) -> str | None:
    """One sentence for a failure that space or permissions repair, however deep it lies; None for all others."""
    for cause in _chain(error):
        code = cause.errno if isinstance(cause, OSError) else None
        if code is None:
            code = next((number for text, number in _TEXTS.items() if text in str(cause)), None)
        if code in EXPLAINED:
            place = getattr(cause, "filename", None)
            where = f": {place}" if place else ""
            return f"{EXPLAINED[code]}{where}; finished steps are kept, the same command goes on when that is repaired"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
