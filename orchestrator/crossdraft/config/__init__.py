"""Every option, stated once: its name, type, default, range, unit and help, as fields of dataclasses.

The command line (`cli.commands`), environment variables, the file of a cluster (`cluster.config`), the bodies of HTTP
(`serving.http.requests`), Python's `GenerationRequest` and the reference pages are made from these.
"""

MOST_DRAFT_TOKENS = 64  # that can be requested at once
MOST_LIKELY = 20  # most probable ids whose log-probabilities can be requested with each token
MOST_NODES = 63  # of a token tree, without its root: a node's ancestors are the bits of one number in the engine
MOST_PATHS = 16  # guessed in a pass
