"""Who is where."""

from dataclasses import replace

from crossdraft.cluster.directory import EXPIRY, SETTLING, Directory, Entry, Role

TARGET = Entry("t", Role.TARGET, "small", "", "10.0.0.1:7000", "", "10.0.0.1", 1)
DRAFTER = Entry("d", Role.DRAFTER, "small", "byte-level", "10.0.0.2:7000", "", "10.0.0.2", 1)

ORCHESTRATOR = Entry("o", Role.ORCHESTRATOR, "small", "", "", "", "10.0.0.1", 2)


def test_only_changes_are_counted_and_who_withdraws_is_gone() -> None:
    directory = Directory(version=7)
    directory.announce(TARGET, 0.0)
    directory.announce(TARGET, 1.0)
    directory.announce(DRAFTER, 1.0)
    assert (directory.version, directory.entries) == (9, (DRAFTER, TARGET))
    again = replace(TARGET, address="10.0.0.1:7001", process=2)  # it was started again
    directory.announce(again, 2.0)
    assert (directory.version, directory.entries) == (10, (DRAFTER, again))
    for _ in range(2):
        directory.withdraw(TARGET.id)
        assert (directory.version, directory.entries) == (11, (DRAFTER,))


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
    assert directory.unsettled(10.0 + SETTLING) == directory.unsettled(100.0) == 0
