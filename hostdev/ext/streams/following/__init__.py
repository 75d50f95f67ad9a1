"""`hostdev train --follow`: a run over files that arrive in a folder."""
