"""The bytes of the painter, replayed by a terminal emulator, next to those of the output alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pyte
import pytest
from hypothesis import given, settings, strategies as st

from elasticstate.driver.painter import Painter

PARTS = ("generation 3", "4 workers on 2 hosts", "tick 1,284", "5.1 ticks/s")
LINE = " · ".join(PARTS)


class Emulator:
    """Terminal emulator with its scrolled lines."""

    def __init__(self, columns: int = 80, lines: int = 10) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._stream = pyte.ByteStream(self.screen)

    def feed(self, data: bytes) -> None:
        self._stream.feed(data.replace(b"\n", b"\r\n"))  # as the kernel does for a terminal

    def rows(self) -> list[str]:
        """Return all rows from the first one, without trailing space."""
        scrolled = ("".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top)
        rows = [row.rstrip() for row in (*scrolled, *self.screen.display)]
        return without_end(rows)


def without_end(rows: list[str]) -> list[str]:
    """Return the rows up to the last one that is not empty."""
    while rows and not rows[-1]:
        rows = rows[:-1]
    return rows


def painter(columns: int = 80, lines: int = 10) -> Painter:
    return Painter(lambda: os.terminal_size((columns, lines)))


def chunks(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    yield from (data[start:end] for start, end in pairwise(places))


PIECES = st.sampled_from(
    [
        b"elasticrun: generation 2: 3 workers on 1 host\n",
        b"[localhost:0]  10%|\xe2\x96\x88\xe2\x96\x88        | 100/1000 [00:01<00:09, 99.9it/s]\r",
        b"[localhost:0]  20%|\xe2\x96\x88\xe2\x96\x88\xe2\x96\x88       | 200/1000 [00:01<00:09, 99.9it/s]\r",
        b"\x1b[31mred\x1b[0m and plain\n",
        b"no end",
        b"\n",
        b"\nsecond bar 5/10\x1b[A\r",
        b"x" * 80,
        b"x" * 161 + b"\n",
        "läng · 漢字\n".encode(),
    ]
)


@settings(max_examples=25)
@given(st.lists(PIECES, max_size=12).map(b"".join), st.lists(st.integers(0, 3000), max_size=12))
def test_all_output_is_what_it_is_without_the_line(data: bytes, cuts: list[int]) -> None:
    """Also rows that end at the edge, sequences and characters that arrive in two pieces, and nested bars."""
    data = re.sub(rb"\r(?=[^\r\n]+\n)", b"\r\x1b[K", data)  # a line over a bar: see the next test
    ours, plain, paints = Emulator(), Emulator(), painter()
    ours.feed(paints.line(PARTS))
    for chunk in chunks(data, cuts):
        ours.feed(paints.output(chunk))
        plain.feed(chunk)
        shown = ours.rows()
        assert shown.count(LINE) <= 1
        if LINE in shown:
            assert shown.index(LINE) == len(shown) - 1
            assert without_end(shown[:-1]) == plain.rows()
        ours.feed(paints.line(PARTS))
    ours.feed(paints.line(()))
    assert ours.rows() == plain.rows()
    assert ours.screen.cursor.x == plain.screen.cursor.x


def test_a_line_over_a_bar_leaves_nothing_of_the_bar() -> None:
    ours, paints = Emulator(), painter()
    for data in (b"[h:0]  50%|#####     |\r", b"short\n[h:0]  60%|######    |\r[h:1] x\n", b"bar\r", b"\n"):
        ours.feed(paints.output(data) + paints.line(PARTS))
    assert ours.rows() == ["short", "[h:1] x", "bar", "", LINE]


def test_the_line_is_there_after_each_whole_line_and_each_bar() -> None:
    ours, paints = Emulator(), painter()
    ours.feed(paints.line(PARTS))
    for number in range(30):
        ours.feed(paints.output(b"line %d\n" % number))
        assert ours.rows()[-3:] == [f"line {number}", "", LINE]
        ours.feed(paints.output(b"bar %d\r" % number))
        assert ours.rows()[-2:] == [f"bar {number}", LINE]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (120, LINE),
        (60, "generation 3 · 4 workers on 2 hosts · tick 1,284"),
        (40, "generation 3 · 4 workers on 2 hosts"),
        (10, "generati…"),
        (1, ""),
    ],
)
def test_a_narrow_terminal_has_the_first_parts(columns: int, shown: str) -> None:
    ours, paints = Emulator(columns), painter(columns)
    ours.feed(paints.line(PARTS))
    ours.feed(paints.output(b"x\n"))
    assert ours.rows() == (["x", "", shown] if shown else ["x"])


def test_the_width_changes() -> None:
    size = [80, 10]
    ours, paints = Emulator(), Painter(lambda: os.terminal_size(size))
    ours.feed(paints.line(PARTS) + paints.output(b"one\n"))
    for columns, lines in ((40, 10), (100, 12), (60, 20)):
        size[:] = columns, lines
        ours.screen.resize(lines, columns)
        ours.feed(paints.line(PARTS) + paints.output(b"and\n"))
        rows = ours.rows()
        assert [row for row in rows if "generation" in row] == [rows[-1]]
        assert LINE.startswith(rows[-1])
    ours.feed(paints.line(()))
    assert ours.rows() == ["one", "and", "and", "and"]


def test_a_pressed_key_leaves_no_second_line() -> None:
    ours, paints = Emulator(), painter()
    ours.feed(paints.output(b"one\n") + paints.line(PARTS))
    ours.feed(b"\n")  # the terminal's echo of Enter
    ours.feed(paints.line(PARTS) + paints.output(b"two\n"))
    assert ours.rows() == ["one", "", "two", "", LINE]


def test_without_colours_if_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    codes = {code for found in re.findall(rb"\x1b\[([\d;]*)m", painter().line(PARTS)) for code in found.split(b";")}
    assert codes <= {b"", b"0", b"1", b"2"}
