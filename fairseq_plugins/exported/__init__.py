"""What is copied into the folder of an exported model, and never imported here."""
