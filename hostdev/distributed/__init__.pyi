# The public names, each with its module.
from .agreement import UnlikeError as UnlikeError
from .channel import PeerLostError as PeerLostError
from .process_group import Ranks as Ranks
from .process_group import ranks as ranks
from .session import join as join
from .world import Mesh as Mesh
from .world import World as World
