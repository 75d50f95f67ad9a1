"""`hostdev verify`: train in every mode on the user's data, and compare each step bit by bit."""
