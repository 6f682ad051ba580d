"""Outputs over a Ray cluster: services and orchestrators as actors, and who is where."""
