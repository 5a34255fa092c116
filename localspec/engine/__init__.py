"""The local engine: one step after another on its own thread, text on the other side of a queue."""
