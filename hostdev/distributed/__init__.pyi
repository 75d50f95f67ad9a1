# The public names, each with its module.
from .agreement import UnlikeError as UnlikeError
from .channel import PeerLostError as PeerLostError
from .mesh import Mesh as Mesh
from .process_group import Ranks as Ranks
from .process_group import ranks as ranks
from .session import join as join
from .world import World as World
