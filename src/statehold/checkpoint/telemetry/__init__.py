"""What can be seen of saves, restores and copies: stages, figures, and lines in the log."""
