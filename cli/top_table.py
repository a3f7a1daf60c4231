"""A table of processes that fits: where rows are too wide, their names get lines of their own."""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 10_000  # columns


@dataclass(frozen=True, slots=True)
class Row:
    service: str
    address: str
    cells: list[str]


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """Headings go down a line at spaces."""

    title: str
    headings: tuple[str, ...]
    rows: list[Row]

    @property
    def row_count(self) -> int:
        return len(self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self._table(has_names=True)
        unbounded = options.update(max_width=_UNBOUNDED)
        if Measurement.get(console, unbounded, wide).maximum <= options.max_width:
            yield wide
            return
        lines = console.render_lines(self._table(has_names=False), options)
        head = len(lines) - len(self.rows)
        for number, line in enumerate(lines):
            if number >= head:
                row = self.rows[number - head]
                yield Text(f"{row.service} {row.address}", overflow="fold")
            yield from line
            yield Segment.line()

    def _table(self, *, has_names: bool) -> Table:
        made = empty_table(self.title)
        if has_names:
            made.add_column(no_wrap=True)
            made.add_column(no_wrap=True)
        for heading in self.headings:
            made.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
        for row in self.rows:
            names = [row.service, row.address] if has_names else []
            made.add_row(*names, *row.cells)
        return made


def empty_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
