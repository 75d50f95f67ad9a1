# The public names, each with its module.
from .models import check_model as check_model
from .plugins import check_exporter as check_exporter
from .plugins import check_source as check_source
from .plugins import check_store as check_store
from .plugins import check_tracker as check_tracker
from .policies import check_admission as check_admission
from .policies import check_eviction as check_eviction
