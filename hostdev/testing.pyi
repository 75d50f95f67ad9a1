from hostdev.ext.testing.models import check_model as check_model
from hostdev.ext.testing.plugins import check_exporter as check_exporter
from hostdev.ext.testing.plugins import check_source as check_source
from hostdev.ext.testing.plugins import check_store as check_store
from hostdev.ext.testing.plugins import check_tracker as check_tracker
from hostdev.ext.testing.policies import check_admission as check_admission
from hostdev.ext.testing.policies import check_eviction as check_eviction
