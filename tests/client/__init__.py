"""Tests of kvhost_client: against a real kvhostd, and against fakes that misbehave as no kvhostd does."""
