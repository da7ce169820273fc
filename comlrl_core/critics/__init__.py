"""Critics: what a history, or a history with a response, is worth."""
