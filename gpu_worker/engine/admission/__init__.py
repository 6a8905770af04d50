"""Who is let in: requests as sequences, room for them, who gives way, and who waits for a store that is silent."""
