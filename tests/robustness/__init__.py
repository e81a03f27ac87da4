"""Trouble that people had with other ways of saving memory, each as a test beside the plain model."""
