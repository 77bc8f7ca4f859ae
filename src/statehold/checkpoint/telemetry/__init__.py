"""Telemetry of saves, restores and copies: stages, figures, and log lines."""
