"""Extensions: everything that uses the engine's public names and that the engine does not need.

An extension imports engine modules and public modules of other extensions. The engine (the other folders of `hostdev`)
never imports an extension, not even inside a function: it finds one through a registry (`hostdev.core.registry`).
"""
