"""One program for each cache. Each runs in that cache's own environment and is told what to do on standard
input; they import nothing of the project but this package and `benchmarks.peers.driver`."""
