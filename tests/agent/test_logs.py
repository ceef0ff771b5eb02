"""Log files of attempts: capped, kept in number, readable from any place across cuts."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.agent.logs import LINE_CHARACTERS_MAX, LOGS_KEPT, TAIL_LINES, ReplicaLogs


def grown(folder: Path, data: bytes, bytes_max: int = 1000) -> ReplicaLogs:
    logs = ReplicaLogs(folder, bytes_max)
    append(logs, data)
    return logs


def append(logs: ReplicaLogs, data: bytes) -> None:
    with open(logs.prepare(1), "ab") as log:
        log.write(data)


def test_a_log_within_its_share_is_left_alone(tmp_path: Path) -> None:
    logs = grown(tmp_path, b"x" * 500)
    assert not logs.cap(1)
    assert logs.path(1).stat().st_size == 500


def test_a_log_that_outgrew_its_share_keeps_its_newest_part_and_goes_on_where_the_engine_writes(tmp_path: Path) -> None:
    logs = grown(tmp_path, b"".join(b"%09d\n" % n for n in range(1000)))
    with open(logs.path(1), "ab", buffering=0) as engine:
        assert logs.cap(1)
        engine.write(b"after\n")
        assert logs.read(1, -16, 100).text == "000000999\nafter\n"
    assert sum(entry.stat().st_size for entry in tmp_path.iterdir()) <= 1000
    assert all(stat.S_IMODE(entry.stat().st_mode) & 0o077 == 0 for entry in tmp_path.iterdir() if entry.name.count(".") > 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=12), st.integers(1, 300))
def test_a_reader_that_follows_sees_every_byte_in_order_or_skips_what_was_cut(sizes: list[int], step: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        logs = ReplicaLogs(Path(folder), 1000)
        written, place = b"", 0
        for size in sizes:
            data = bytes(97 + (len(written) + n) % 26 for n in range(size))
            written += data
            append(logs, data)
            logs.cap(1)
            while True:
                part = logs.read(1, place, step)
                assert part.text.encode() == written[part.offset : part.next_offset]
                assert part.offset >= place
                if part.next_offset == place:
                    break
                place = part.next_offset
            assert place == len(written)
        assert logs.read(1, -10, 10).text.encode() == written[-10:]
        assert logs.read(1, len(written) + 50, 10).text == ""
        assert sum(entry.stat().st_size for entry in Path(folder).iterdir()) <= 1000


def test_a_tail_is_the_last_lines_and_no_line_is_endless(tmp_path: Path) -> None:
    logs = grown(tmp_path, b"\n".join([b"line %d" % n for n in range(200)] + [b"y" * 5000]), bytes_max=1 << 20)
    tail = logs.tail(1)
    assert len(tail) == TAIL_LINES
    assert tail[-2] == "line 199"
    assert len(tail[-1]) == LINE_CHARACTERS_MAX


def test_bytes_that_are_no_text_do_not_break_a_tail(tmp_path: Path) -> None:
    assert grown(tmp_path, b"\xff\xfe\x00broken\n").tail(1)[-1].endswith("broken")


def test_only_the_newest_attempts_are_kept(tmp_path: Path) -> None:
    logs = ReplicaLogs(tmp_path, 1000)
    for attempt in range(1, 31):
        logs.prepare(attempt).write_bytes(b"z" * 2000)
        logs.cap(attempt)
    assert logs.attempts() == tuple(range(31 - LOGS_KEPT, 31))
    assert len(list(tmp_path.iterdir())) == 2 * LOGS_KEPT


def test_an_attempt_without_a_log_is_said_to_be_missing(tmp_path: Path) -> None:
    logs = ReplicaLogs(tmp_path / "not-there", 1000)
    assert logs.tail(1) == ()
    assert logs.attempts() == ()
    assert not logs.cap(1)
    with pytest.raises(FileNotFoundError):
        logs.read(1, 0, 10)
    logs.remove()


def test_the_last_lines_steer_no_terminal(tmp_path: Path) -> None:
    logs = grown(
        tmp_path, b"\x1b]0;owned\x07\x1b[31mCUDA error\x1b[0m\x07\n10%\r50%\rdone\tin 3 s\x1b[2J\n\xc2\x9b31mlate \xe2\x80\xaegnp.exe\n"
    )
    assert logs.tail(1) == ("CUDA error", "10%", "50%", "done\tin 3 s", "late gnp.exe")
