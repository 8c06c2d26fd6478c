"""What leaves a run: stream chunks, text, calls of streamers."""
