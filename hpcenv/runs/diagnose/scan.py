"""Find the known patterns in one log, which may be many gigabytes long. Runs on: LOGIN NODE.

A log repeats itself: most lines differ from an earlier line only in their digits, and most words have occurred before.
So the digits are removed from each block of the log, and the lines of the block are compared with the set of known
lines. Only new lines are split into words, and only new words are compared with the words of the patterns. Lines with a
word of a pattern are then read in full. The memory is limited: the sets are emptied when they become large, and a long
line is searched in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from hpcenv.runs.diagnose import lines
from hpcenv.runs.diagnose.patterns import Pattern

_BLOCK = 256 * 1024
# A longer line is searched in parts of this size.
_LONGEST_LINE = 1024 * 1024
# Bytes of a line around an anchor that are matched and kept.
_AROUND = 2048
# The traceback of a line is searched in this many bytes before the line.
_BEFORE = 64 * 1024
# Limits of what is remembered: bytes and number of lines, words, and pairs of pattern and rank.
_SEEN_BYTES = 4 * 1024 * 1024
_SEEN_WORDS = 50_000
_MOST_FOUND = 5000
# Limits of the search for later lines of a writer, which show that it continued: bytes after a line, and the number of
# searches.
_AFTER = 128 * 1024
_MOST_AFTER = 500
# The number of searches in one block for a traceback before a line.
_MOST_LOOKS = 50
_MOST_PEERS = 200

# The row of the table after which torchrun names the rank that failed first on a node.
FIRST_FAILURE = "torchrun-first-failure"

# The number of lines below that row that are read. Lines of other tasks may be between the lines of the table.
_TABLE_LINES = 24

# Words that are in many lines without a failure.
_COMMON = frozenset({b"error", b"failed"})

# Pattern, rank and task: a pattern is kept once for each writer.
_HitKey = tuple[str, int | None, int | None]

# The characters in which lines with the same meaning differ.
_REMOVED = b"0123456789+-."


@dataclass
class PatternFound:
    """A pattern in the log of one rank.

    Attributes:
        line: number of the line, from 1.
        offset: where the line begins, in bytes.
        rank, node, time: from the line, or from the lines before it; None or empty if these lines do not name them.
        task: number of the srun task that wrote the line; None if the line has no label of srun.
        where, where_line: the last line of the user's code in the traceback, such as `train.py:12`, and the line of
            the log at which this traceback ends.
        after: how many ordinary lines its writer wrote after this line, at most `lines.MANY`. For a line of a
            launcher, lines of any writer count.
        count: how many lines match the pattern.
        peers: peer that the lines name -> number of lines that name it.
    """

    pattern: Pattern
    line: int
    offset: int
    text: str
    rank: int | None
    node: str
    time: str
    where: str
    where_line: int = 0
    task: int | None = None
    count: int = 1
    peers: dict[str, int] = field(default_factory=dict)
    after: int = 0

    @property
    def went_on(self) -> bool:
        """Whether the writer wrote so many ordinary lines after this line that it must have continued."""
        return self.after >= lines.MANY


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """What one log contains.

    Attributes:
        found: for each pattern and rank, the first line that matches. Instead of the first line, a later line is taken
            if the last line of the pattern counts, or if the rank continued after the first line.
        size, lines: bytes and lines of the log.
    """

    found: tuple[PatternFound, ...]
    size: int
    lines: int


def scan(file: BinaryIO, patterns: Sequence[Pattern], *, start: int = 0) -> Scanned:
    """Return the patterns that a log contains.

    Args:
        file: the log.
        patterns: in the order of the table. If several patterns match a line, the first of these patterns counts.
        start: number of bytes to leave out at the start. Line numbers are counted from the first byte that is read.
    """
    search = _LogSearch(patterns)
    file.seek(start)
    for block in _blocks(file):
        search.feed(block)
    search.look_after(file, start)
    return Scanned(found=tuple(search.found.values()), size=search.offset, lines=search.lines)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the log in pieces of whole lines. A very long line is divided."""
    rest = b""
    while piece := file.read(_BLOCK):
        block = rest + piece
        end = block.rfind(b"\n") + 1
        if not end and len(block) < _LONGEST_LINE:
            rest = block
            continue
        end = end or len(block)
        rest = block[end:]
        yield block[:end]
    if rest:
        yield rest


@dataclass
class _LogBlock:
    """A piece of the log. Its lines that contain a word of a pattern are read in full.

    Attributes:
        texts: the lines of the piece.
        late: for patterns whose last line counts: pattern and writer -> last line, its place, and the number of lines.
        again: pattern and writer -> a later line of a pattern that was already found.
        looked: how many times the lines before a line were searched.
    """

    texts: list[bytes]
    late: dict[_HitKey, tuple[Pattern, lines.Line, int, int, int]] = field(default_factory=dict)
    again: dict[_HitKey, tuple[Pattern, lines.Line, int, int]] = field(default_factory=dict)
    looked: int = 0


class _LogSearch:
    """The state of a search: the known lines and words, and the findings."""

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._patterns = patterns
        # Word without its digits -> numbers of the patterns with this word. A word is searched within the words of a
        # line.
        self._keys: dict[bytes, tuple[int, ...]] = {}
        for number, pattern in enumerate(patterns):
            for anchor in pattern.anchors:
                key = key_of(anchor)
                self._keys[key] = (*self._keys.get(key, ()), number)
        self._anchors = [tuple(anchor.encode() for anchor in pattern.anchors) for pattern in patterns]
        # `_plain` has the known lines without a word of a pattern, and `_suspect` has the known lines with such a word.
        # `_words` has all known words, and `_suspect_words` has the known words that contain a word of a pattern.
        self._plain: set[bytes] = set()
        self._plain_bytes = 0
        self._suspect: dict[bytes, tuple[int, ...]] = {}
        self._words: set[bytes] = set()
        self._suspect_words: dict[bytes, tuple[int, ...]] = {}
        # The end of the previous block, and the lines of that end. The lines are split only when they are needed.
        self._before = b""
        self._earlier: list[bytes] | None = None
        self.found: dict[_HitKey, PatternFound] = {}
        self._again: dict[_HitKey, PatternFound] = {}
        self.offset = 0
        self.lines = 0

    def feed(self, block: bytes) -> None:
        """Search a piece of whole lines."""
        shapes = block.translate(None, _REMOVED).split(b"\n")
        distinct = set(shapes)
        new = distinct - self._plain
        new -= self._suspect.keys()
        if new:
            self._classify(new)
        suspects = distinct & self._suspect.keys()
        if suspects:
            self._read(block, [n for n, shape in enumerate(shapes) if shape in suspects], shapes)
        self.offset += len(block)
        self.lines += block.count(b"\n") + (0 if block.endswith(b"\n") else 1)
        self._before = (self._before + block)[-_BEFORE:] if len(block) < _BEFORE else block[-_BEFORE:]
        self._earlier = None

    def _classify(self, new: set[bytes]) -> None:
        """Store for each new line whether it contains a word of a pattern."""
        self._forget()
        words = set(b"\n".join(new).split())
        self._learn(words - self._words)
        suspects = words & self._suspect_words.keys()
        for shape in list(new) if suspects else ():
            own = suspects.intersection(shape.split())
            if own:
                self._suspect[shape] = tuple(sorted({n for word in own for n in self._suspect_words[word]}))
                new.remove(shape)
        self._plain |= new
        self._plain_bytes += sum(map(len, new))

    def _learn(self, words: set[bytes]) -> None:
        """Store for each new word of the log whether it contains a word of a pattern."""
        text = b"\n".join(words)
        self._words |= words
        for key, numbers in self._keys.items():
            at = text.find(key)
            while at >= 0:
                begin, end = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
                end = len(text) if end < 0 else end
                word = text[begin:end]
                self._suspect_words[word] = (*self._suspect_words.get(word, ()), *numbers)
                at = text.find(key, end)

    def _forget(self) -> None:
        """Empty the sets that have become too large, to limit the memory."""
        if self._plain_bytes > _SEEN_BYTES or len(self._plain) > _SEEN_WORDS:
            self._plain, self._plain_bytes = set(), 0
        if len(self._suspect) > _MOST_FOUND:
            self._suspect = {}
        if len(self._words) > _SEEN_WORDS:
            self._words, self._suspect_words = set(), {}

    def _read(self, data: bytes, numbers: Sequence[int], shapes: Sequence[bytes]) -> None:
        """Read in full the lines of a block that contain a word of a pattern."""
        block = _LogBlock(data.split(b"\n"))
        position, last = 0, 0
        for number in numbers:
            position += sum(map(len, block.texts[last:number])) + number - last
            last = number
            for candidate in self._suspect[shapes[number]]:
                if self._test(candidate, block, number, position):
                    break
        for pattern, line, number, position, count in block.late.values():
            if (pattern.id, *line.writer) in self.found or len(self.found) < _MOST_FOUND:
                self._add(pattern, line, block, number, position, count)
        for key, place in block.again.items():
            self._again[key] = self._make(*place[:2], block, *place[2:])

    def look_after(self, file: BinaryIO, start: int) -> None:
        """Record whether the writer of each found line continued.

        If so, replace the line by a later line of its pattern.
        """

        def ordinary(found: PatternFound) -> int:
            file.seek(start + found.offset)
            _, _, after = file.read(_AFTER).partition(b"\n")
            return lines.ordinary(after, None if found.pattern.of_launcher else (found.rank, found.task))

        for key, found in list(self.found.items())[:_MOST_AFTER]:
            found.after = ordinary(found)
            later = self._again.get(key)
            if found.went_on and later is not None and (after := ordinary(later)) < lines.MANY:
                self.found[key] = replace(later, count=found.count, peers=found.peers, after=after)

    def _test(self, candidate: int, block: _LogBlock, number: int, position: int) -> bool:
        """Return whether a line matches a pattern, and record a line that matches."""
        raw, pattern = block.texts[number], self._patterns[candidate]
        at, anchor = next(((at, one) for one in self._anchors[candidate] if (at := raw.find(one)) >= 0), (-1, b""))
        if at < 0:
            return False
        line = lines.parse(raw, at, around=_AROUND)
        if pattern.kind != "cascade" and not pattern.warns and lines.is_remark(line.text.partition(anchor.decode())[0]):
            return False
        match = pattern.match.search(line.text) if pattern.match is not None else None
        if pattern.match is not None and match is None:
            return False
        if match is not None and match.groupdict().get("rank"):
            line = replace(line, rank=int(match["rank"]))
        key = (pattern.id, *line.writer)
        if pattern.last:
            if not lines.follows_code(self._lines_before(block, number, lines.MOST_BETWEEN), line):
                return False
            earlier = block.late.get(key)
            count = 1 if earlier is None else earlier[-1] + 1
            block.late[key] = (pattern, line, number, position, count)
            return True
        known = self.found.get(key)
        if known is not None:
            known.count += 1
            block.again[key] = (pattern, line, number, position)
            self._add_code(known, line, block, number)
        elif len(self.found) < _MOST_FOUND:
            known = self._add(pattern, line, block, number, position)
        if match is not None and known is not None:
            _count_peer(known, match.groupdict().get("peer"))
            known.node = match.groupdict().get("node") or known.node
        return True

    def _lines_before(self, block: _LogBlock, number: int, most: int) -> list[bytes]:
        """Return the lines before a line, including lines at the end of the previous block."""
        before = block.texts[max(0, number - most) : number]
        if len(before) == most:
            return before
        if self._earlier is None:
            self._earlier = self._before.split(b"\n")[:-1]
        return [*self._earlier[len(before) - most :], *before]

    def _add_code(self, known: PatternFound, line: lines.Line, block: _LogBlock, number: int) -> None:
        """Add the line of code to a known message if the message occurs again, now at the end of a traceback."""
        if known.where or block.looked > _MOST_LOOKS:
            return
        before = self._lines_before(block, number, lines.MOST_BEFORE)
        if lines.follows_code(before[-lines.MOST_BETWEEN :], line):
            block.looked += 1
            known.where, known.where_line = lines.look_back(before, line).where, self.lines + number + 1

    def _add(
        self, pattern: Pattern, line: lines.Line, block: _LogBlock, number: int, position: int, count: int = 1
    ) -> PatternFound:
        found = self._make(pattern, line, block, number, position)
        known = self.found.get((pattern.id, found.rank, found.task))
        found.count = count if known is None else known.count + count
        self.found[pattern.id, found.rank, found.task] = found
        return found

    def _make(self, pattern: Pattern, line: lines.Line, block: _LogBlock, number: int, position: int) -> PatternFound:
        block.looked += 1
        around = lines.Around()
        if block.looked <= _MOST_LOOKS:
            around = lines.look_back(self._lines_before(block, number, lines.MOST_BEFORE), line)
        rank, node, time = line.rank, lines.node_of(line.text), lines.time_of(line.text) or around.time
        if pattern.id == FIRST_FAILURE:
            rank, node, time = lines.first_in_table(block.texts[number + 1 : number + 1 + _TABLE_LINES], line.task)
        return PatternFound(
            pattern=pattern, line=self.lines + number + 1, offset=self.offset + position, text=line.text, rank=rank,
            node=node, time=time, where=around.where, task=line.task, where_line=self.lines + number + 1,
        )  # fmt: skip


def _count_peer(found: PatternFound, peer: str | None) -> None:
    if peer is not None and (peer in found.peers or len(found.peers) < _MOST_PEERS):
        found.peers[peer] = found.peers.get(peer, 0) + 1


def key_of(anchor: str) -> bytes:
    """Return the longest word of a pattern's fixed text, without the characters that are ignored in lines."""
    words = anchor.encode().translate(None, _REMOVED).split()
    return max(words, key=lambda word: (word not in _COMMON, len(word)))
