"""Click commands, one file a group: they read the settings, build what they need and print. No logic of their own."""
