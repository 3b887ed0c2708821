"""Machine code that nobody uses any more: a digest's folder is removed a month after its last use.

Every edit of a kernel, every update of numba or Python begins a folder of its own. Each folder holds a marker whose
time is that of its last use, to the day.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from pathlib import Path

logger = logging.getLogger(__name__)

MARKER = ".used"
KEPT_DAYS = 30
_DAY_S = 24 * 3600.0
_GOING = "going-"
"""Before the name of a folder that is being removed; one that stays was left by a process that ended meanwhile."""
_FOLDER = re.compile(rf"({_GOING})?[0-9a-f]{{32}}")


def tidy(current: Path) -> None:
    """Note that the folder `current` is used; once a day, remove its siblings that were not used for 30 days.

    Never fatal: what cannot be removed stays. Other processes may do the same at the same time.
    """
    try:
        now = time.time()
        marker = current / MARKER
        if marker.exists() and now - marker.stat().st_mtime < _DAY_S:
            return
        marker.touch()
        folders = [folder for folder in current.parent.iterdir() if folder.name != current.name]
    except OSError as error:  # a cache that can be read only, say
        logger.debug("the use of machine code is not noted: %s", error)
        return
    for folder in folders:
        try:
            if _FOLDER.fullmatch(folder.name) and _is_old(folder, now):
                _remove(folder, now)
        except OSError as error:  # another process was faster, or holds a file open
            logger.debug("old machine code is not removed: %s", error)


def _is_old(folder: Path, now: float) -> bool:
    """Is it a folder that was not used for 30 days? One without a marker was last used when it was last written to."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    marker = folder / MARKER
    used = (marker if marker.exists() else folder).stat().st_mtime
    return now - used > KEPT_DAYS * _DAY_S


def _remove(folder: Path, now: float) -> None:
    """Rename, look again, then remove: who comes meanwhile finds no folder rather than half of one, and compiles."""
    going = folder.with_name(f"{_GOING}{folder.name.removeprefix(_GOING)}")
    os.rename(folder, going)
    if _is_old(going, now):
        shutil.rmtree(going, ignore_errors=True)
        logger.info("machine code that was not used for %d days is removed: %s", KEPT_DAYS, folder.name)
    else:  # somebody noted a use between the two looks
        os.rename(going, folder)
