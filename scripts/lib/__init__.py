"""What the commands share, a room a topic. Nothing here is imported by recipes or by verl."""
