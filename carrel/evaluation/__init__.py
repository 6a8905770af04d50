"""Facts, documents and scores of the recall evaluation; the bundled model is trained on the same generator."""
