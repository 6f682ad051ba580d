"""The methods' names, for help texts and defaults: importing the methods themselves imports numpy."""

METHODS = ("standard", "tli", "slem", "seeded")
