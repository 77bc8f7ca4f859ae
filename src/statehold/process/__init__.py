"""This process: its forks and its end, its host's memory, its garbage, and the errors it keeps."""
