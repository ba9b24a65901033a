"""Drafters: what guesses the tokens after the committed ones. One interface, in `base`."""
