"""Runs of commands that are kept: a command that nothing has changed for is not run again.

So a search that was interrupted goes on where it was. What may have changed is told by sizes and times of modification:
of every file in the folder that the command runs in, of what its arguments name, and of the modules and files that its
processes opened elsewhere. What they have of installed packages is told by the folders of those.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchfinder.cache import default_cache_url
from batchfinder.cuda_stub import CudaBuild, StubCard
from batchfinder.programs.dry_run import DryRun
from batchfinder.programs.scratch import files_in

_PACKAGE = Path(__file__).parents[1]
"""Which has the stub, and what computes values and watches a run."""
_KEPT_SECONDS = 30 * 24 * 3600
_OF_A_TERMINAL = re.compile(
    r"_|PWD|OLDPWD|SHLVL|TERM.*|COLUMNS|LINES|WINDOWID|SSH_.*|XDG_SESSION_.*|TMUX.*|STY|INVOCATION_ID|JOURNAL_STREAM|"
    r"BATCHFINDER_.*"
)
"""Variables that say where a command was typed and not what it does."""


class KeptRuns:
    """The runs that are kept in this user's cache folder, for 30 days.

    Args:
        folder: the folder that commands run in copies of.
        build: the CUDA build of PyTorch.
        anew: use none that is there, and keep the new ones in their place.
    """

    def __init__(self, folder: Path, build: CudaBuild, anew: bool = False) -> None:
        self._folder, self._build, self._anew = folder.resolve(), build, anew
        cache = default_cache_url()
        if "://" in cache or "::" in cache:  # what a run has to say is of this machine's files
            from platformdirs import user_cache_dir

            cache = user_cache_dir("batchfinder", appauthor=False)
        self._where = Path(cache).expanduser().absolute() / "runs"

    def key(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        config: Mapping[str, int],
        cards: Sequence[StubCard],
        settings: Mapping[str, object],
    ) -> str:
        """The digest of all that is known before a run.

        Args:
            argv: the command with its sizes.
            environment: what is set for it, sizes included.
            config: what is written into its config files.
            cards: what it sees.
            settings: of `dry_run`.
        """
        others = [each for each in (self._where, Path(tempfile.gettempdir()).resolve()) if self._folder in each.parents]
        own = {
            str(path.relative_to(self._folder)): [found.st_size, found.st_mtime_ns]
            for path, found in files_in(self._folder).items()
            if not any(each in path.parents for each in others)
        }
        words = [word.rpartition("=")[2] for word in (*argv, *environment.values())]
        variables = {name: value for name, value in os.environ.items() if not _OF_A_TERMINAL.fullmatch(name)}
        parts = {
            "code": _stats(each for each in _PACKAGE.rglob("*") if each.suffix in (".py", ".c", ".h")),
            "build": self._build.version,
            "argv": list(argv),
            "environment": {**variables, **environment},
            "config": dict(config),
            "cards": [asdict(card) for card in cards],
            "settings": dict(settings),
            "folder": str(self._folder),
            "own": own,
            "named": _stats(self._folder / word for word in words if word),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> DryRun | None:
        """A run of that key, if nothing that it read has changed since."""
        if self._anew:
            return None
        try:
            kept = json.loads((self._where / f"{key}.json").read_text())
            return DryRun.from_json(kept["run"]) if _stats(kept["read"]) == kept["read"] else None
        except (OSError, ValueError, KeyError, TypeError):  # none, or another version's
            return None

    def keep(self, key: str, run: DryRun) -> None:
        """Keep a run. One whose processes were ended before they could say what they have read is not kept."""
        if run.read is None:
            return
        kept = {"run": run.to_json(), "read": _stats(map(Path, run.read))}
        with contextlib.suppress(OSError):  # what is not kept is run again
            self._where.mkdir(parents=True, exist_ok=True)
            part = self._where / f"{key}.{os.getpid()}.part"
            part.write_text(json.dumps(kept))
            part.rename(self._where / f"{key}.json")
            for old in self._where.iterdir():
                if old.stat().st_mtime < time.time() - _KEPT_SECONDS:
                    old.unlink(missing_ok=True)


def _stats(paths: Iterable[Path | str]) -> dict[str, Any]:
    """Size and time of modification of each that is there."""
    found: dict[str, Any] = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            seen = os.stat(path)
            found[str(path)] = [seen.st_size, seen.st_mtime_ns]
    return found
