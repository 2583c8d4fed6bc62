"""What a person deploys."""
