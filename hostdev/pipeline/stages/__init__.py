"""The stages of a batch, one file each. A function takes the previous stage's result and returns a new one.

read -> deduplicate -> plan -> look_up -> send -> step -> update
"""
