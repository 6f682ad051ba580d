"""Who is where."""

from crossdraft.serving.cluster.directory import FORGOTTEN_AFTER, Directory, Entry

TARGET = Entry("small", "", "10.0.0.1:7000", "a")
DRAFTER = Entry("small", "byte-level", "10.0.0.2:7000", "b")


def test_what_is_announced_is_there_until_it_withdraws() -> None:
    directory = Directory()
    directory.announce(DRAFTER, 0.0)
    directory.announce(TARGET, 0.0)
    assert directory.entries == (TARGET, DRAFTER)
    directory.withdraw(TARGET.address)
    assert directory.entries == (DRAFTER,)


def test_only_changes_are_counted() -> None:
    directory = Directory()
    directory.announce(TARGET, 0.0)
    directory.announce(TARGET, 1.0)
    assert directory.version == 1
    directory.announce(Entry("another", "", TARGET.address, "a"), 2.0)
    assert directory.version == 2
    directory.withdraw(TARGET.address)
    directory.withdraw(TARGET.address)
    assert directory.version == 3


def test_who_is_silent_is_forgotten() -> None:
    directory = Directory()
    directory.announce(TARGET, 0.0)
    directory.announce(DRAFTER, 3.0)
    directory.forget(FORGOTTEN_AFTER)
    assert directory.entries == (TARGET, DRAFTER)
    directory.forget(FORGOTTEN_AFTER + 0.5)
    assert directory.entries == (DRAFTER,)
    assert directory.version == 3
    directory.announce(TARGET, FORGOTTEN_AFTER + 1)
    assert directory.version == 4
