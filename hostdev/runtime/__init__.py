"""The user's interface: tables behind features, one for loop, and gradients back to their rows."""
