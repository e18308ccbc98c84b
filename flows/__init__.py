"""What runs in which order: Prefect flows. No torch below this folder.

Importing the package sets the environment of Prefect, MLflow and DVC, for a flow may be started by
the command line, by a worker or by a test, and they read it at import. A worker's flow run ends
when the worker is killed; else it would go on, unknown to Prefect, until it next printed a line.
"""

import os

from tasks import environment, prctl

environment.set_defaults()
if "PREFECT__FLOW_RUN_ID" in os.environ:
    prctl.end_with_worker()
