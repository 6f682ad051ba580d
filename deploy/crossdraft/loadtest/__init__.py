"""Load tests: requests on a schedule, what of them was when, and figures for people and programs."""
