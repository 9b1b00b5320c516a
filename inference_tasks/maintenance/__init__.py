"""What is done beside the workers: aging, dropped tasks, lost messages, and the beat that starts it."""
