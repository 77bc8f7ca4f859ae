"""What can be seen of saves, restores and copies: traces, figures, progress, lines in the log."""
