"""`python -m bench`: run rows, print the table, write the results, draw the plots."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from functools import partial
from pathlib import Path

from rich.console import Console

from bench.machine import machine
from bench.report import show
from bench.results import Benchmark, write
from bench.rows.backlog import NAME as KEPT
from bench.rows.table import QUICK, ROWS
from bench.servers import BenchServers
from bench.stage import Stage

_RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Ours and what people would use instead.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"which to run: {', '.join(ROWS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"run {', '.join(QUICK)}")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default: 5)")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink counts and times, e.g. 0.01 to try it out")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder for JSON and plots")
    parser.add_argument("--again", action="store_true", help="put the rows into the results that are there")
    parser.add_argument("--no-plots", action="store_true", help="draw nothing")
    options = parser.parse_args()
    if options.again and not (options.results / "latest.json").exists():
        parser.error(f"--again: there are no results in {options.results}")
    unknown = set(options.rows) - set(ROWS)
    if unknown or options.rounds < 1 or not 0 < options.scale <= 1:
        parser.error(f"no such row: {', '.join(sorted(unknown))}" if unknown else "--rounds or --scale is out of range")
    chosen = options.rows or (QUICK if options.quick else tuple(ROWS))
    console = Console(width=None if Console().is_terminal else 200)

    benchmarks: list[Benchmark] = []
    failed: list[str] = []
    with BenchServers() as servers:
        where = machine(servers) | {"rounds": options.rounds, "scale": options.scale}
        say = partial(console.print, style="dim")
        stage = Stage(servers, options.rounds, options.scale, lambda text: say(f"  {text}"), options.quick)
        for name in chosen:
            began = time.perf_counter()
            console.print(f"{name} …", highlight=False)
            try:
                benchmarks += ROWS[name](stage)
            except Exception as error:
                # Keep the other rows, which may have taken an hour.
                console.print_exception()
                failed.append(f"{name}: {_reason(error)}")
            servers.clear(keep=KEPT)
            servers.durability()  # raises if a row has changed the servers' sync
            console.print(f"{name}: {time.perf_counter() - began:.1f} s", highlight=False)
    where |= {"conversations": stage.shared["conversations"]} if "conversations" in stage.shared else {}
    show(where, benchmarks, console)
    write(options.results, where, benchmarks, chosen if options.again else ())
    console.print(f"written: {options.results / 'latest.json'}", highlight=False, soft_wrap=True)
    if not options.no_plots:
        from bench.plots import draw

        for path in draw(options.results / "latest.json", options.results):
            console.print(f"drawn: {path}", highlight=False, soft_wrap=True)
    if failed:
        sys.exit("".join(f"failed: {row}\n" for row in failed))


def _reason(error: Exception) -> str:
    """Return the last line of an error's text, which names the error also where a worker sends its whole traceback."""
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


if __name__ == "__main__":
    main()
