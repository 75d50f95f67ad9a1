# The public names, each with its module.
from .network import Network as Network
from .plan import Layout as Layout
from .plan import sliced as sliced
