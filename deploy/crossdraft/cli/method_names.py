"""The methods' names, for help texts and defaults: importing the methods themselves imports numpy."""

METHODS = (
    "standard",
    "union",
    "tli",
    "rdk",
    "coupled",
    "coupled-shared",
    "slem",
    "seeded",
    "slrs",
    "tokentiming",
)
