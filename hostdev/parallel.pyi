from hostdev.ext.parallel import Layout as Layout
from hostdev.ext.parallel import Network as Network
from hostdev.ext.parallel import sliced as sliced
