"""What runs in which order: Prefect flows. No torch below this folder.

Importing the package sets the environment of Prefect, MLflow and DVC, for a flow may be started by
the command line, by a worker or by a test, and they read it at import.
"""

from tasks import environment

environment.set_defaults()
