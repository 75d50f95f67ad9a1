"""What a stranger adds to hostdev."""
