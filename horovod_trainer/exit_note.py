"""exit.json: the first rank that ends badly says why; the front reads it, since launchers lose codes and sentences (L0)."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from horovod_trainer.launchers import launcher_rank

FOLDER_VARIABLE = "HOROVOD_TRAINER_EXIT_DIR"
NAME = "exit.json"


@dataclass(frozen=True)
class ExitNote:
    """Which rank, on which host, ended with which exit code, and its sentences (one a line)."""

    rank: int
    host: str
    code: int
    sentence: str


def leave_note(code: int, sentence: str, environment: Mapping[str, str] = os.environ) -> None:
    """Write exit.json where the front asked for it, whole or not at all; does nothing when a rank was here before.

    Linked under its name, not renamed: of two ranks that fail at once one link is made, on network file systems too.
    A folder that cannot be written is no reason to end otherwise than for the cause itself.
    """
    folder = environment.get(FOLDER_VARIABLE)
    if not folder:
        return
    place = Path(folder) / NAME
    temporary = place.with_name(f".{NAME}.{secrets.token_hex(8)}")
    note = ExitNote(launcher_rank(), socket.gethostname(), int(code), sentence)
    with suppress(OSError):
        try:
            temporary.write_text(json.dumps(asdict(note), ensure_ascii=False) + "\n", "utf-8")
            os.link(temporary, place)
        finally:
            temporary.unlink(missing_ok=True)


def read_note(folder: Path) -> ExitNote | None:
    """Return the note in a folder; None without one, or where it is no note of ours."""
    try:
        return ExitNote(**json.loads((folder / NAME).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
