"""This process: its forks, its end, its host's memory, and the errors it keeps."""
