"""Decides which work runs next: no IO, no clock, no environment; time and measurements are arguments."""
