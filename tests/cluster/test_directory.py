"""Who is where."""

from dataclasses import replace

from crossdraft.cluster.directory import EXPIRY, SETTLING, Directory, Entry, Role

TARGET = Entry("t", Role.TARGET, "small", "", "10.0.0.1:7000", "", "10.0.0.1", 1)
DRAFTER = Entry("d", Role.DRAFTER, "small", "byte-level", "10.0.0.2:7000", "", "10.0.0.2", 1)


def test_what_is_announced_is_there_until_it_withdraws() -> None:
    directory = Directory()
    directory.announce(TARGET, 0.0)
    directory.announce(DRAFTER, 0.0)
    assert directory.entries == (DRAFTER, TARGET)
    directory.withdraw(TARGET.id)
    assert directory.entries == (DRAFTER,)


def test_a_process_that_was_started_again_is_there_once() -> None:
    directory = Directory()
    directory.announce(TARGET, 0.0)
    again = replace(TARGET, address="10.0.0.1:7001", process=2)
    directory.announce(again, 1.0)
    assert directory.entries == (again,)


def test_only_changes_are_counted() -> None:
    directory = Directory(version=7)
    directory.announce(TARGET, 0.0)
    directory.announce(TARGET, 1.0)
    assert directory.version == 8
    directory.announce(replace(TARGET, process=2), 2.0)
    assert directory.version == 9
    directory.withdraw(TARGET.id)
    directory.withdraw(TARGET.id)
    assert directory.version == 10


def test_who_is_silent_is_forgotten() -> None:
    directory = Directory()
    directory.announce(TARGET, 0.0)
    directory.announce(DRAFTER, 3.0)
    directory.forget(EXPIRY)
    assert directory.entries == (DRAFTER, TARGET)
    directory.forget(EXPIRY + 0.5)
    assert directory.entries == (DRAFTER,)
    assert directory.version == 3
    directory.announce(TARGET, EXPIRY + 1)
    assert directory.version == 4


def test_a_new_one_is_not_asked_before_it_has_heard_of_everybody() -> None:
    directory = Directory(began=10.0)
    assert directory.unsettled(10.5) == SETTLING - 0.5
    assert directory.unsettled(10.0 + SETTLING) == 0
    assert directory.unsettled(100.0) == 0
