"""Prompts and answers of `tests.drafter.repetitive`: tasks whose answers repeat much of what was there before."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A prompt, and what a model that does the task writes."""

    kind: str
    name: str
    prompt: str
    answer: str


ACCOUNT = '''class Account:
    """An account with a balance."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount < 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)
'''
CACHE = """import time


class Cache:
    def __init__(self, size, seconds):
        self._size = size
        self._seconds = seconds
        self._entries = {}

    def get(self, key, default=None):
        entry = self._entries.get(key)
        if entry is None:
            return default
        value, until = entry
        if time.monotonic() > until:
            del self._entries[key]
            return default
        return value

    def put(self, key, value):
        while len(self._entries) >= self._size:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = value, time.monotonic() + self._seconds

    def clear(self):
        self._entries.clear()
"""
STATISTICS = """def mean(values):
    if not values:
        raise ValueError("there are no values")
    return sum(values) / len(values)


def variance(values):
    middle = mean(values)
    return mean([(value - middle) ** 2 for value in values])


def median(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return mean(ordered[half - 1 : half + 1])
"""


def _changed(text: str, *changes: tuple[str, str]) -> str:
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


EDITS = (
    (
        "account",
        ACCOUNT,
        "Rename the class to BankAccount, and refuse amounts that are not numbers.",
        _changed(
            ACCOUNT,
            ("class Account:", "class BankAccount:"),
            (
                "        if amount < 0:\n",
                "        if not isinstance(amount, (int, float)):\n"
                '            raise TypeError("amount must be a number")\n'
                "        if amount < 0:\n",
            ),
        ),
    ),
    (
        "cache",
        CACHE,
        "Add a lock, so that threads can share the cache.",
        _changed(
            CACHE,
            ("import time\n", "import threading\nimport time\n"),
            ("        self._entries = {}\n", "        self._entries = {}\n        self._lock = threading.Lock()\n"),
            (
                "        while len(self._entries) >= self._size:\n"
                "            del self._entries[next(iter(self._entries))]\n"
                "        self._entries[key] = value, time.monotonic() + self._seconds\n",
                "        with self._lock:\n            while len(self._entries) >= self._size:\n"
                "                del self._entries[next(iter(self._entries))]\n"
                "            self._entries[key] = value, time.monotonic() + self._seconds\n",
            ),
            ("        self._entries.clear()\n", "        with self._lock:\n            self._entries.clear()\n"),
        ),
    ),
    (
        "statistics",
        STATISTICS,
        "Add docstrings, and a function for the standard deviation.",
        _changed(
            STATISTICS,
            ("def mean(values):\n", 'def mean(values):\n    """The arithmetic mean."""\n'),
            ("def variance(values):\n", 'def variance(values):\n    """The mean squared distance from the mean."""\n'),
            (
                "\n\ndef median(values):\n",
                '\n\ndef deviation(values):\n    """The square root of the variance."""\n'
                "    return variance(values) ** 0.5\n"
                '\n\ndef median(values):\n    """The value in the middle."""\n',
            ),
        ),
    ),
)

PEOPLE = (
    ("alice", 31, "Berlin", 12.5),
    ("bob", 45, "Paris", 9.0),
    ("carol", 27, "Rome", 14.25),
    ("dave", 52, "Madrid", 7.5),
    ("erin", 38, "Lisbon", 11.0),
    ("frank", 61, "Vienna", 8.75),
    ("grace", 24, "Prague", 15.0),
)
FILES = (
    ("src/main.py", 4120),
    ("src/util.py", 918),
    ("src/net.py", 2761),
    ("tests/test_net.py", 1502),
    ("README", 333),
)


def _table() -> str:
    return "".join(f"{name},{age},{city},{score}\n" for name, age, city, score in PEOPLE)


def _records() -> str:
    lines = (
        f'    {{"name": "{name}", "age": {age}, "address": {{"city": "{city}", "country": null}}, "score": {score}}}'
        for name, age, city, score in PEOPLE
    )
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _calls(state: str) -> str:
    return "".join(
        f'{{"tool": "read_file", "arguments": {{"path": "{path}", "encoding": "utf-8"}}, "state": "{state}", '
        f'"bytes": {size}}}\n'
        for path, size in FILES
    )


JSON = (
    ("records", f"Write these rows as JSON records.\n\nname,age,city,score\n{_table()}\nJSON:\n", _records()),
    (
        "country",
        f"Set the country of Berlin to Germany, and that of Paris to France.\n\n{_records()}\nJSON:\n",
        _changed(
            _records(),
            ('"Berlin", "country": null', '"Berlin", "country": "Germany"'),
            ('"Paris", "country": null', '"Paris", "country": "France"'),
        ),
    ),
    ("calls", f"These calls have ended: set their state.\n\n{_calls('running')}\nJSON lines:\n", _calls("done")),
)

READ = '''def read_json(path):
    """The value in a JSON file."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)
'''
WRITE = '''def write_json(path, value):
    """Writes a value to a JSON file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
'''
BOTH = f"import json\n\n\n{READ}\n\n{WRITE}"
OF_PATHS = _changed(
    BOTH,
    ("import json\n", "import json\nfrom pathlib import Path\n"),
    ("(path):", "(path: Path):"),
    ("(path, value):", "(path: Path, value):"),
    ("with open(path, encoding", "with path.open(encoding"),
    ('with open(path, "w", encoding', 'with path.open("w", encoding'),
    ("indent=2)", "indent=2, sort_keys=True)"),
)
UPDATE = '''

def update_json(path: Path, **changes):
    """Changes some keys of the object in a JSON file."""
    value = read_json(path)
    value.update(changes)
    write_json(path, value)
'''
TURNS = (
    ("Write a function that reads a JSON file.", f"Here is a function that reads it:\n\nimport json\n\n\n{READ}"),
    ("Now also one that writes it.", f"Here are both functions:\n\n{BOTH}"),
    ("Let them take a Path, and sort the keys.", f"Here are both functions, with a Path:\n\n{OF_PATHS}"),
    ("Add one that changes some keys.", f"Here are all three functions:\n\n{OF_PATHS}{UPDATE}"),
    (
        "Use errors='strict', and show it all again.",
        "Here are all three functions:\n\n"
        + _changed(f"{OF_PATHS}{UPDATE}", ('encoding="utf-8")', 'encoding="utf-8", errors="strict")')),
    ),
)


def _chat() -> list[Case]:
    said, cases = "", []
    for number, (question, answer) in enumerate(TURNS, 1):
        prompt = f"{said}User: {question}\n\nAssistant: "
        cases.append(Case("chat", f"turn {number}", prompt, answer))
        said = f"{prompt}{answer}\n"
    return cases


CASES = (
    *(
        Case("edit", name, f"{task}\n\nThe file:\n\n{text}\nThe new file:\n\n", answer)
        for name, text, task, answer in EDITS
    ),
    *(Case("JSON", name, prompt, answer) for name, prompt, answer in JSON),
    *_chat(),
)
