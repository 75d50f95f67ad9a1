"""The stages of a batch. A function takes the previous stage's result and returns a new one.

read -> deduplicate -> plan -> look up -> send -> step -> update
"""
