# The public names, each with its module.
from .layout import Layout as Layout
from .network import Network as Network
from .plan import sliced as sliced
