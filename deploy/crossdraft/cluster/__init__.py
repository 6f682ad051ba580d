"""Serving on a Ray cluster: services and orchestrators as actors, a directory of them, fronts, deployment."""
