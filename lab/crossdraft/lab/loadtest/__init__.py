"""Load tests: requests on a schedule, the moments of each one's events, and figures for people and programs."""
