"""The output of a run: stream chunks, text, calls of streamers."""
