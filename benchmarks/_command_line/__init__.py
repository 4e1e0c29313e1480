"""What several commands share: arguments, and progress on the terminal."""
