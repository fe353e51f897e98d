"""One module per model family, each with one declaration."""
