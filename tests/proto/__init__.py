"""The protocols: generated code is current, loads where engines need it, and keeps the wire's rules."""
