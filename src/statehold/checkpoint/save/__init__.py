"""A save: from the call on the training thread to the committed step."""
