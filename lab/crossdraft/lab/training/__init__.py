"""How the bundled models are made: corpus, tokenizers, training, written text, model cards."""
