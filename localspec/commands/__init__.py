"""Click commands, one file a group. They read the configuration, build what they need and print; no logic of their own."""
