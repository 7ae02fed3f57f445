from trocar_server.spool import Report


def test_a_report_is_a_table_in_units_that_people_read() -> None:
    report = Report(saved_bytes=3 << 30, stall_count=1234, stall_s=0.25, file_count=7)
    lines = dict(line.rsplit("  ", 1) for line in str(report).splitlines())
    shown = {name.strip(): value.strip() for name, value in lines.items()}
    assert shown["saved"] == "3,072.0 MiB"
    assert shown["stalls"] == "1,234"
    assert shown["stall time"] == "0.250 s"
    assert shown["files"] == "7"
    assert len({len(line) for line in str(report).splitlines()}) == 1


def test_notes_are_lines_of_their_own_and_come_once() -> None:
    report = Report()
    for _ in range(3):
        report.note("the page cache grows")
    assert str(report).splitlines()[-1] == "note: the page cache grows"
    assert report.notes == ["the page cache grows"]


def test_notes_do_not_grow_without_end() -> None:
    report = Report()
    for number in range(1000):
        report.note(f"file {number} is short")
    assert len(report.notes) < 50
