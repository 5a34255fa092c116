"""The terminal interface. Sees `api`, `chats` and `config` only; what needs no terminal lies outside `widgets`."""
