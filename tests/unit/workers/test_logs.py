from workers.logs import MAX_LINE_BYTES, LineReader


def lines_of(*chunks: bytes) -> list[str]:
    lines: list[str] = []
    reader = LineReader(lines.append)
    for chunk in chunks:
        reader.feed(chunk)
    reader.finish()
    return lines


def test_lines_end_wherever_the_reads_cut_them():
    assert lines_of(b"on", b"e\ntw", b"o\n\nthree") == ["one", "two", "three"]


def test_a_progress_bar_is_a_line_each_time_it_moves():
    assert lines_of(b"0/2\r1/2\r", b"2/2\r\ndone\n") == ["0/2", "1/2", "2/2", "done"]


def test_a_character_cut_in_half_at_the_end_of_a_read_stays_whole():
    text = "重み 3/8"
    assert lines_of(*(bytes([b]) for b in text.encode())) == [text]


def test_bytes_that_are_not_utf8_are_shown_as_such():
    assert lines_of(b"a\xff\xfeb\n") == ["a��b"]


def test_a_line_of_5_mb_is_cut_and_the_next_one_is_whole():
    got = lines_of(*[b"x" * 65_536] * 80, b"\nnext\n")
    assert [len(line) for line in got] == [MAX_LINE_BYTES, 4]
    assert got[1] == "next"
