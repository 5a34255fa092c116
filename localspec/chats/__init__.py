"""Conversations on disk: SQLite store, search, export, import. Knows no engine, no terminal and no torch."""

from localspec.chats.opening import open_store, private_store
from localspec.chats.records import Chat, ChatError, Hit, NewChat, Stored
from localspec.chats.store import ChatStore
from localspec.chats.worker import StoreWorker

__all__ = [
    "Chat",
    "ChatError",
    "ChatStore",
    "Hit",
    "NewChat",
    "StoreWorker",
    "Stored",
    "open_store",
    "private_store",
]
