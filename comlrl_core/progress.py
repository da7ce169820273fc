"""One progress bar for every stage that takes longer than two seconds."""

import os
from typing import Any

from tqdm.auto import tqdm

SHOW_AFTER_SECONDS = 2.0


def progress(desc: str, total: int | None, unit: str) -> "tqdm[Any]":
    """A bar that appears once the work has taken two seconds; use it as a context manager and call `update(n)`.

    `COMLRL_PROGRESS=0` switches bars off (logs of scheduled runs read better without).
    """
    return tqdm(
        total=total,
        desc=desc,
        unit=unit,
        delay=SHOW_AFTER_SECONDS,
        dynamic_ncols=True,
        leave=False,
        disable=os.environ.get("COMLRL_PROGRESS") == "0",
    )
