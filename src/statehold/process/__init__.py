"""This process: its forks, its end, its host's memory, its garbage, and the errors it keeps."""
