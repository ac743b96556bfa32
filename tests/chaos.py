"""`make chaos`: the long versions of the fault tests, and one JSON line of what was counted."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import bad_inputs, save_kills
from tests.hosts.bench import available
from tests.hosts.faults import cut_links
from tests.ranks import launching
from tests.ranks.jobs import kill_ranks
from tests.ranks.launching import horovodrun, mpirun


def main() -> None:
    """Run every fault as often as asked, print the counts, and fail when anything was lost, hung or differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save-kills", type=int, default=100)
    parser.add_argument("--rank-kills", type=int, default=20, help="half of them under horovodrun, half under mpirun")
    parser.add_argument("--link-cuts", type=int, default=3, help="needs root: the hosts are network namespaces")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    seed = args.seed
    # first, before anything starts threads: the savers are forked
    saves, lost = said("save kills", lambda: save_kills.run_all(args.save_kills, seed))
    counted: dict[str, Any] = {"save_kills": saves, "checkpoints_lost": lost}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = launching.prepare(folder)
        ranks = said("rank kills", lambda: rank_kills(settings, folder, args.rank_kills, random.Random(seed)))
        cuts = said("link cuts", lambda: link_cuts(settings, folder, args.link_cuts))
    counted |= {
        "rank_kills": ranks["rank_kills"],
        "link_cuts": cuts["link_cuts"],
        "hangs": ranks["hangs"] + cuts["hangs"],
    }
    counted["inexact_resumes"] = ranks["inexact_resumes"] + cuts["inexact_resumes"]
    counted["bad_inputs"], counted["tracebacks"] = said("bad inputs", bad_inputs.run_all)
    print(json.dumps(counted))
    bad = ("checkpoints_lost", "hangs", "inexact_resumes", "tracebacks")
    sys.exit(int(any(counted[name] for name in bad)))


def rank_kills(settings: dict[str, object], folder: Path, kills: int, chance: random.Random) -> dict[str, int]:
    """Return the counts of both launchers' jobs together."""
    total = {"rank_kills": 0, "hangs": 0, "inexact_resumes": 0}
    for name, launcher, share in (("horovodrun", horovodrun, kills - kills // 2), ("mpirun", mpirun, kills // 2)):
        (folder / name).mkdir()
        one = kill_ranks(launcher, 2, settings, folder / name, share, chance)
        print(f"  {name}: {one}", file=sys.stderr)
        total = {key: total[key] + one[key] for key in total}
    return total


def link_cuts(settings: dict[str, object], folder: Path, cuts: int) -> dict[str, int]:
    """Return the counts of jobs over two hosts; none where hosts cannot be made, and then it says why."""
    reason = available()
    if reason is None:
        return cut_links(settings, folder, cuts)
    print(f"no link is cut: {reason}", file=sys.stderr)
    return {"link_cuts": 0, "hangs": 0, "inexact_resumes": 0}


def said(what: str, run: Callable[[], Any]) -> Any:
    """Run a part and say how long it took."""
    began = time.monotonic()
    print(f"{what} ...", file=sys.stderr)
    result = run()
    print(f"  {result} in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return result


if __name__ == "__main__":
    main()
