"""Views of saves, restores and copies: traces, figures, progress, log lines."""
