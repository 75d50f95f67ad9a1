"""What users build on: tables behind features, one for loop, gradients back to their rows."""
