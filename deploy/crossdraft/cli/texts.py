"""Texts to go on with where a user gives none: the beginnings of code and prose, of no file that was trained on."""

PROMPTS = (
    'def moving_average(values, window):\n    """Return the mean of each run of `window` values."""\n',
    "class Inventory:\n    def __init__(self, items=None):\n        self.items = dict(items or {})\n\n    def add(self",
    "The first lighthouse on this coast was built of wood, and it burned down twice. The second one was",
    'import csv\nimport sys\n\n\ndef main():\n    with open(sys.argv[1], newline="") as file:\n        for row in',
    "To make bread you need flour, water, salt and yeast. Mix them, and then",
    "    try:\n        connection = self.pool.get(timeout=timeout)\n    except Empty:\n        raise",
)
