"""`carrel doctor`: whether this machine and installation can start a server, and what to change."""
