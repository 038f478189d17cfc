"""The view of a running demo, on standard error: a panel on a terminal, else a line a second."""

from __future__ import annotations

from collections import deque
from typing import Self

import msgspec
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

_LINE_EVERY_S = 1.0
_BARS = " ▁▂▃▄▅▆▇█"
_BARS_SHOWN = 60


class Sample(msgspec.Struct, frozen=True):
    """Where the demo stands at a moment."""

    elapsed_s: float
    phase: str
    acknowledged: int
    #: The rate since the sample before.
    appends_per_s: float
    #: Acknowledged checkpoints that are not in Postgres yet.
    lag: int
    #: Flush transactions so far, and how many checkpoints each took along on average.
    transactions: int
    coalescing: float
    p50_ms: float
    p99_ms: float


def new_view() -> View:
    """The view that suits standard error."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return _Screen(console) if console.is_terminal else _Lines(console)


class _Lines:
    """A line a second, and one whenever the phase changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._next_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, sample: Sample) -> None:
        if sample.phase == self._phase and sample.elapsed_s < self._next_s:
            return
        self._phase, self._next_s = sample.phase, sample.elapsed_s + _LINE_EVERY_S
        self._console.print(
            f"{sample.elapsed_s:5.1f} s  {sample.phase:<18}{sample.acknowledged:>8,} checkpoints "
            f"{sample.appends_per_s:>7,.0f}/s   lag {sample.lag:>7,}   {sample.transactions:>4} transactions "
            f"of {sample.coalescing:,.0f}   p99 {sample.p99_ms:g} ms"
        )


class _Screen:
    """A panel that is kept up to date."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, transient=True)
        self._rates: deque[float] = deque(maxlen=_BARS_SHOWN)
        self._lags: deque[float] = deque(maxlen=_BARS_SHOWN)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, sample: Sample) -> None:
        self._rates.append(sample.appends_per_s)
        self._lags.append(sample.lag)
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(justify="right", min_width=10)
        table.add_column()
        table.add_row("checkpoints acknowledged", f"{sample.acknowledged:,}", "")
        table.add_row("appends/s", f"{sample.appends_per_s:,.0f}", f"[green]{_bars(self._rates)}[/]")
        table.add_row("not in Postgres yet", f"{sample.lag:,}", f"[yellow]{_bars(self._lags)}[/]")
        table.add_row("Postgres transactions", f"{sample.transactions:,}", "")
        table.add_row("checkpoints in each", f"{sample.coalescing:,.0f}", "")
        table.add_row("append p50 / p99", f"{sample.p50_ms:g} / {sample.p99_ms:g} ms", "")
        trouble = "Postgres" in sample.phase
        title = f"[{'bold red' if trouble else 'bold'}]{sample.phase}[/]  {sample.elapsed_s:.0f} s"
        self._live.update(Panel(table, title=title, title_align="left", border_style="red" if trouble else "none"))


#: Receives the samples.
View = _Lines | _Screen


def _bars(values: deque[float]) -> str:
    top = max(values, default=0) or 1
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] for value in values)
