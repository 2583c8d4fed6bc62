"""The benchmark harness: that it teaches, runs, reports and fails as it says. Figures are not tests."""
