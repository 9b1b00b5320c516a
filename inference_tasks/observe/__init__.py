"""What watches the system from outside."""
