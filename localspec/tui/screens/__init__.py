"""Screens compose widgets and connect them with the conversation."""
