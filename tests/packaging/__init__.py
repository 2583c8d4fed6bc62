"""What `pip install kvhost` brings, and what the repository promises about itself."""
