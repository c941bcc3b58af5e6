"""Draft sources: everything that guesses how an action goes on."""
