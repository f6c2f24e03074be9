import os

from workers.proc import Family, Identity, Row, members

US = os.getpid()


def rows_of(*rows: tuple[int, int, int, int]) -> dict[int, Row]:
    """(pid, start, parent, session) of each process; this test's own is always there."""
    table = {pid: Row(pid, start, parent, session, is_zombie=False) for pid, start, parent, session in rows}
    return {1: Row(1, 0, 0, 1, False), US: Row(US, 1, 1, US, False), **table}


A, B, C, D = (10_000_001, 10_000_002, 10_000_003, 10_000_004)  # above the kernel's highest pid


def found(family: Family, rows: dict[int, Row], marked: set[int] | None = None) -> set[int]:
    return {row.pid for row in members(family, rows, marked or ())}


def test_children_and_the_whole_session_belong_to_the_worker():
    rows = rows_of((A, 50, US, A), (B, 51, A, A), (C, 52, 1, A), (D, 53, 1, D))
    assert found(Family("m", A, {Identity(A, 50)}), rows) == {A, B, C}


def test_an_engine_that_outlives_its_server_is_found_by_its_session():
    assert found(Family("m", A, {Identity(A, 50)}), rows_of((B, 51, 1, A))) == {B}


def test_a_child_in_a_session_of_its_own_is_found_with_its_descendants():
    rows = rows_of((A, 50, US, A), (B, 51, A, B), (C, 52, 1, B))
    assert found(Family("m", A, {Identity(A, 50)}), rows) == {A, B, C}


def test_one_that_cut_all_ties_is_found_when_it_was_seen_before_or_carries_the_mark():
    rows = rows_of((B, 51, 1, B), (C, 52, 1, C), (D, 53, 1, D))
    assert found(Family("m", A, {Identity(A, 50), Identity(B, 51)}), rows, {C}) == {B, C}


def test_a_stranger_that_got_the_pid_later_is_not_ours():
    rows = rows_of((A, 99, 1, A), (B, 100, A, A))
    assert found(Family("m", A, {Identity(A, 50)}), rows) == set()


def test_a_session_number_alone_proves_nothing_about_an_earlier_run():
    assert found(Family("m", None, {Identity(A, 50)}), rows_of((B, 51, 1, A))) == set()


def test_the_supervisor_and_its_own_session_are_never_members():
    rows = rows_of((A, 50, US, US), (B, 51, 1, US))
    assert found(Family("m", A, {Identity(A, 50)}), rows, {US}) == {A}
