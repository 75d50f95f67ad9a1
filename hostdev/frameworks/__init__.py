"""Other frameworks: the public names of `hostdev.ext.frameworks`."""
