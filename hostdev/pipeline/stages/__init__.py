"""The stages of a batch, a file each. A function takes the result of the stage before and returns a new one.

read -> deduplicate -> plan -> look_up -> send -> step -> update
"""
