"""The port: OpenAI and other protocols over an api Engine. Knows HTTP; knows no tensors and no chats."""
