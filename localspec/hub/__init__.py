"""Getting models: catalogue, downloads, conversion to our layout, what is installed. Knows no engine."""
