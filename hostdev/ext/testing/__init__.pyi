# The public names, each with its module.
from .exporters import check_exporter as check_exporter
from .models import check_model as check_model
from .policies import check_admission as check_admission
from .policies import check_eviction as check_eviction
from .sources import check_source as check_source
from .stores import check_store as check_store
from .trackers import check_tracker as check_tracker
