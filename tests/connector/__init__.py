"""Tests of the connector, one file a room of it."""
