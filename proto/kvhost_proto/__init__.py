"""The protocols of kvhost: `.proto` files and the Python modules made from them, nothing written by hand."""
