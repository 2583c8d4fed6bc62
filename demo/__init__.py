"""`make demo`: a long question asked of two engine processes in turn, with one cache beside them."""
