"""Widgets, one a file. A widget draws what it is given and posts messages; it does not know the app."""
