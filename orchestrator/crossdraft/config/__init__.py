"""Every option, stated once: its name, type, default, range, unit and help, as fields of dataclasses.

The command line (`cli.commands`), environment variables, the file of a cluster (`cluster.config`), the bodies of HTTP
(`serving.http.requests`), Python's `GenerationRequest` and the reference pages are made from these.
"""
