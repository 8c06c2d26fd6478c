"""The server of `engine serve`: OpenAI's HTTP protocol in front of a batch."""
